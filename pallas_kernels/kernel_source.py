"""The sealed kernels that this process has loaded; what its CUDA lowering emits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from contracts.errors import BadBundle, KernelMissing

if TYPE_CHECKING:
    from pallas_kernels.region import Region
    from pallas_kernels.seal import SealedProgram

Type = tuple[tuple[int, ...], str]
Parameter = int | float | bool | str
_Call = tuple[str, tuple[Type, ...], tuple[tuple[str, Parameter], ...]]


class KernelSource:
    """Sealed programs by the call that they serve: region, shapes and dtypes of its operands, parameters."""

    def __init__(self) -> None:
        self._programs: dict[_Call, SealedProgram] = {}

    def add(self, programs: Iterable[SealedProgram]) -> None:
        """Adds a bundle's programs. Raises BadBundle where another bundle serves a call with other kernels."""
        added = {_call_of(program): program for program in programs}
        for call, program in added.items():
            known = self._programs.get(call)
            if known is not None and known != program:
                raise BadBundle(
                    field=f"kernels of region {program.region}",
                    found=", ".join(program.digests),
                    allowed=", ".join(known.digests),
                    reason=f"This process has loaded other kernels for {_shapes(call[1])}; it can run one set only.",
                )
        self._programs |= added

    def find(
        self, region: Region, types: tuple[Type, ...], parameters: Mapping[str, Parameter]
    ) -> SealedProgram | None:
        """The program of a call; None while nothing was added.

        Raises KernelMissing for a call that no added program serves: lowering it here would run a kernel that the
        contract does not name.
        """
        if not self._programs:
            return None
        found = self._programs.get((region.name, types, tuple(sorted(parameters.items()))))
        if found is None or found.version != region.version:
            sealed = sorted({call[1][0][0] for call in self._programs if call[0] == region.name})
            raise KernelMissing(
                field=f"region {region.name}",
                found=f"version {region.version} on {_shapes(types)}, {dict(parameters)}",
                allowed="first operand " + (", ".join(map(str, sealed)) or "of no shape: it was not sealed"),
                reason="The policy's bundle holds no kernel for this call; pad to a sealed size, or export again with "
                "it among the buckets.",
            )
        return found


#: JAX hands a lowering rule a primitive's parameters and nothing of the policy that called it, so what a loaded policy
#: brings along is kept for the whole process. Loading a policy folder adds to it; only the CUDA lowering reads it.
LOADED = KernelSource()


def _call_of(program: SealedProgram) -> _Call:
    types = tuple((program.buffers[name].shape, program.buffers[name].dtype) for name in program.operands)
    return program.region, types, program.constants


def _shapes(types: tuple[Type, ...]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)
