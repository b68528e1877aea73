"""The execution contract: everything that both sides must agree on for their bits to be equal."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from contracts import mesh_check, toolchain, validation
from contracts.canonical import canonical_bytes
from contracts.cases import CASES, check_case
from contracts.claims import Claims
from contracts.composition import CompositionEntry
from contracts.deployment import Deployment
from contracts.errors import BadContract, IdentityMismatch, ToolchainMismatch, UnknownCase
from contracts.field_types import CaseSet
from contracts.identities import Identities, compute_identities
from contracts.model import ModelSection
from contracts.section import BITS, EVERYWHERE, IDENTITIES, Section
from contracts.semantics import Semantics


def _in_order(entries: tuple[CompositionEntry, ...]) -> tuple[CompositionEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.region, [CASES.index(case) for case in entry.cases])))


class ExecutionContract(Section):
    """A contract. Build it without `identities` and call `sealed`, or read one with `contracts.load_contract`.

    Construction raises pydantic's `ValidationError` for a field of the wrong type, `BadContract` for sections that
    contradict each other and `IdentityMismatch` for stored identities that the fields do not give.
    """

    schema_version: Annotated[Literal[1], EVERYWHERE]
    """Version of this format."""
    model: ModelSection
    """Which logical model."""
    cases: Annotated[CaseSet, BITS]
    """The log-probability paths that the contract covers."""
    composition: Annotated[tuple[CompositionEntry, ...], Field(min_length=1), AfterValidator(_in_order)]
    """For every region and case exactly one owner."""
    semantics: Semantics
    """What a log-probability means."""
    claims: Claims
    """What has been proved."""
    toolchain: toolchain.Toolchain
    """Versions that the gates ran with."""
    deployment: Deployment = Field(default_factory=Deployment)
    """Facts for the log."""
    identities: Identities | None = None
    """Stored identities; null until sealed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        validation.validate(self)
        if self.identities is not None:
            self.validate_identities()
        return self

    def sealed(self) -> "ExecutionContract":
        """A copy with its identities computed from its fields."""
        return self.model_copy(update={"identities": compute_identities(self)})

    def replaced(self, **sections: Any) -> "ExecutionContract":
        """A validated, sealed copy with whole sections exchanged."""
        fields = {name: getattr(self, name) for name in type(self).model_fields} | {"identities": None} | sections
        return ExecutionContract(**fields).sealed()

    def validate_identities(self) -> Identities:
        """The stored identities. Raises `IdentityMismatch` if a field was changed after sealing, or none are stored."""
        computed = compute_identities(self)
        if self.identities is None:
            raise IdentityMismatch(
                field="identities",
                found="none",
                allowed="the three identities",
                reason="The contract is not sealed; call sealed().",
            )
        for name in IDENTITIES:
            if getattr(self.identities, name) != getattr(computed, name):
                raise IdentityMismatch(
                    field=f"identities.{name}",
                    found=getattr(self.identities, name),
                    allowed=getattr(computed, name),
                    reason="The stored identity is not that of the contract's fields, so a field was changed by hand.",
                )
        return self.identities

    def canonical_bytes(self) -> bytes:
        """RFC 8785 bytes of the whole contract; what a file holds."""
        return canonical_bytes(self.model_dump(mode="json"))

    def owner(self, region: str, case: str) -> CompositionEntry:
        """The entry that computes a region in a case. Raises `UnknownCase`, or `BadContract` for an unknown region."""
        if check_case(case) not in self.cases:
            raise UnknownCase(
                field="case",
                found=case,
                allowed=", ".join(self.cases),
                reason="The contract does not cover this log-probability path.",
            )
        for entry in self.composition:
            if entry.region == region and case in entry.cases:
                return entry
        raise BadContract(
            field="composition",
            found=region,
            allowed=", ".join(sorted({entry.region for entry in self.composition})),
            reason="No entry owns this region; entries are explicit, nothing is filled in.",
        )

    @property
    def arch(self) -> str:
        """The architecture of all regions."""
        return self.composition[0].arch

    def check_mesh(self, mesh: Mapping[str, int]) -> None:
        """Refuse a mesh outside the claims (`contracts.mesh_check.check_mesh`). Raises `MeshNotClaimed`."""
        mesh_check.check_mesh(self.model, self.semantics, self.claims, mesh)

    def check_toolchain(self, installed: Mapping[str, str | None]) -> None:
        """Refuse other versions than the gates ran with, for the fields given. Raises `ToolchainMismatch`."""
        toolchain.check_toolchain(self.toolchain, installed)

    def check_device_kind(self, device_kind: str) -> None:
        """Refuse a kind of device that no gate ran on. Raises `ToolchainMismatch`."""
        if device_kind not in self.claims.device_kinds:
            raise ToolchainMismatch(
                field="claims.device_kinds",
                found=repr(device_kind),
                allowed=", ".join(map(repr, self.claims.device_kinds)) or "no device yet",
                reason="No gate ran on this kind of device: run `isojax verify` on it first.",
            )
