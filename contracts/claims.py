"""Contract section `claims`: on which meshes and devices the equality was proved, and by which gate."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from contracts.axes import AXES, Axis
from contracts.errors import BadContract
from contracts.field_types import DegreeSet, Positive, Text, TextSet
from contracts.float_bits import FloatBits
from contracts.frozen_map import FrozenMap
from contracts.section import BITS, BITS_AND_DEPLOYMENT, DEPLOYMENT, NO_IDENTITY, Section


class InvariantClaim(Section):
    """The bits do not depend on this axis, proved for the listed degrees."""

    axis: Annotated[Axis, BITS_AND_DEPLOYMENT]
    """Mesh axis."""
    kind: Annotated[Literal["invariant"], BITS] = "invariant"
    """`invariant`: any listed degree gives the same bits."""
    degrees: Annotated[DegreeSet, DEPLOYMENT]
    """Degrees that the gate ran. Proving one more changes no bit, so it does not rotate `numerical_policy`."""
    gate: Annotated[Text, NO_IDENTITY]
    """The test that proved it."""

    @property
    def allowed(self) -> tuple[int, ...]:
        """Degrees that a mesh may have."""
        return self.degrees


class PinnedClaim(Section):
    """The bits are proved for one degree only and may differ at any other."""

    axis: Annotated[Axis, BITS_AND_DEPLOYMENT]
    """Mesh axis."""
    kind: Annotated[Literal["pinned"], BITS] = "pinned"
    """`pinned`: only this degree."""
    degree: Annotated[Positive, BITS]
    """The degree. It may decide bits, so it is part of `numerical_policy`."""
    gate: Annotated[Text, NO_IDENTITY]
    """The test that proved it."""

    @property
    def allowed(self) -> tuple[int, ...]:
        """Degrees that a mesh may have."""
        return (self.degree,)


AxisClaim = Annotated[InvariantClaim | PinnedClaim, Field(discriminator="kind")]


def _one_claim_an_axis(claims: tuple[InvariantClaim | PinnedClaim, ...]) -> tuple[InvariantClaim | PinnedClaim, ...]:
    if sorted(claim.axis for claim in claims) != sorted(AXES):
        raise BadContract(
            field="claims.topology",
            found=", ".join(claim.axis for claim in claims) or "no axis",
            allowed=f"each of {', '.join(AXES)} exactly once",
            reason="An axis without a claim would be unchecked, and one with two would be ambiguous.",
        )
    return tuple(sorted(claims, key=lambda claim: AXES.index(claim.axis)))


class Claims(Section):
    """What has been proved. Tolerances are empty, which means exact, unless someone chose otherwise."""

    topology: Annotated[tuple[AxisClaim, ...], AfterValidator(_one_claim_an_axis)]
    """One claim for each of dp, fsdp, pp, tp, ep, sp, cp."""
    device_kinds: Annotated[TextSet, DEPLOYMENT]
    """Device kinds that the gates ran on, as JAX names them; empty only while nothing is proved."""
    state: Annotated[Literal["proved", "unproved"], DEPLOYMENT]
    """`unproved` refuses every mesh until `isojax verify` has run."""
    invalidated_by: Annotated[TextSet, Field(min_length=1), DEPLOYMENT]
    """What makes the proof void, such as `toolchain` or `device_kind`."""
    tolerances: Annotated[FrozenMap[FloatBits], BITS]
    """Largest accepted difference by quantity; empty means exact."""

    def axis(self, name: str) -> InvariantClaim | PinnedClaim:
        """The claim about one axis."""
        return next(claim for claim in self.topology if claim.axis == name)

    @property
    def exact(self) -> bool:
        """Whether the claim is equality of bit patterns."""
        return not self.tolerances


def topology(gate: str, invariant: Mapping[str, Sequence[int]] = {}) -> tuple[InvariantClaim | PinnedClaim, ...]:
    """Claims for all axes: `invariant` over the given degrees, and every other axis pinned to 1; one gate for all."""
    return tuple(
        InvariantClaim(axis=axis, degrees=tuple(invariant[axis]), gate=gate)
        if axis in invariant
        else PinnedClaim(axis=axis, degree=1, gate=gate)
        for axis in AXES
    )
