"""Contract section `toolchain`: the software between a region and its machine code."""

from collections.abc import Mapping
from typing import Annotated

from contracts.errors import ToolchainMismatch
from contracts.field_types import Sha256, Text
from contracts.section import BITS, Section


class Toolchain(Section):
    """Versions that the gates ran with. A compiler may contract, reorder or flush differently in its next release."""

    jax: Annotated[Text, BITS]
    """Version of jax."""
    jaxlib: Annotated[Text, BITS]
    """Version of jaxlib."""
    module_format: Annotated[Text, BITS]
    """Format of the compiled regions: `mosaic_gpu_v2` when sealed, `xla_cpu` on a CPU."""
    ptxas: Annotated[Text | None, BITS]
    """Version of ptxas that compiled the sealed kernels when the gates ran. Null on a CPU, and in an export that no
    card has seen: sealing stops before ptxas, so the version is filled in, here and in the bundle's manifest, by the
    gates' run on the card, which is also what turns the claims from unproved to proved."""
    kernel_manifest: Annotated[Sha256 | None, BITS]
    """SHA-256 of the manifest of the sealed kernels: their order, buffers and shapes. Null on a CPU."""
    engine_runner: Annotated[Text, BITS]
    """The engine's model runner, such as `vllm_v1` or `vllm_v2`."""


def check_toolchain(contract: Toolchain, installed: Mapping[str, str | None]) -> None:
    """Compare what is installed with the contract, for the fields that the caller knows. Raises `ToolchainMismatch`."""
    for name, found in installed.items():
        if name not in Toolchain.model_fields:
            raise ToolchainMismatch(
                field=f"toolchain.{name}",
                found=repr(found),
                allowed=", ".join(Toolchain.model_fields),
                reason="The contract has no such toolchain field.",
            )
        proved = getattr(contract, name)
        if found != proved:
            raise ToolchainMismatch(
                field=f"toolchain.{name}",
                found=repr(found),
                allowed=repr(proved),
                reason="The gates ran with the allowed version; another compiler or runner may round differently.",
            )
