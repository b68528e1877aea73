"""Lowers one kernel to a Mosaic GPU module on any machine and seals its bytes with their SHA-256."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import AbstractDevice, AbstractMesh

from contracts.errors import ToolchainMismatch
from pallas_kernels.hopper_tools import SM_COUNT
from pallas_kernels.program import Buffer, Program, Step

#: The only JAX that may lower, since another one gives other bytes.
SEALING_JAX = "0.11.2"
#: The custom call that XLA and the plugin's compiler agree on. Part of a bundle's identity.
MODULE_FORMAT = "mosaic_gpu_v2"
#: What the kernels are lowered for. Cards of another kind need their own gate before they are claimed.
DEVICE_KIND = "NVIDIA H200"
ARCHITECTURE = "sm90"
#: Bytes that every buffer's address must be a multiple of: XLA aligns its own so, and TMA needs 16 at least.
ALIGNMENT = 256

#: Regions in whose kernels a product and the sum that takes it may be rounded as one. It is much of a softmax's time.
FUSING = ("attention", "paged_attention", "paged_decode_attention")

_DUMP_NAME = "mosaic_gpu.dump_basename"
_FAST_MATH = "fastmath"
#: Modules that MLIR's Python looks for again with every operation it hands out.
_NEVER_THERE = ("jaxlib.mlir.dialects.stable_mosaic_gpu", "jaxlib.mosaic.python.stable_mosaic_gpu", "jax.jaxlib")


@dataclasses.dataclass(frozen=True)
class SealedModule:
    """The module of one launch. ``sha256`` names it; ``operands`` and ``results`` are buffers of its program.

    ``aliases`` holds (operand index, result index) pairs that must be one buffer.
    """

    name: str
    module: bytes
    operands: tuple[str, ...]
    results: tuple[str, ...]
    aliases: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.module).hexdigest()


@dataclasses.dataclass(frozen=True)
class SealedProgram:
    """A region's launches in their fixed order, with every buffer they touch. The bytes say the rest."""

    region: str
    version: str
    constants: tuple[tuple[str, int | float | bool | str], ...]
    buffers: dict[str, Buffer]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    modules: tuple[SealedModule, ...]

    @property
    def scratch(self) -> tuple[str, ...]:
        outside = {*self.operands, *self.results}
        return tuple(name for name in self.buffers if name not in outside)

    @functools.cached_property
    def digests(self) -> tuple[str, ...]:
        return tuple(module.sha256 for module in self.modules)

    @property
    def kernels(self) -> tuple[SealedProgram, ...]:
        """Each launch as a program of its own: what it reads of the others' results is an operand."""
        return tuple(self._alone(module) for module in self.modules)

    def _alone(self, module: SealedModule) -> SealedProgram:
        used = dict.fromkeys((*module.operands, *module.results))
        return dataclasses.replace(
            self,
            buffers={name: self.buffers[name] for name in used},
            operands=module.operands,
            results=module.results,
            modules=(module,),
        )


def check_sealing_toolchain() -> None:
    """Raises ToolchainMismatch unless the installed JAX is the one whose bytes are sealed, and counts in 32 bits."""
    for name, found in (("jax", jax.__version__), ("jaxlib", jaxlib.__version__)):
        if found != SEALING_JAX:
            raise ToolchainMismatch(
                field=f"toolchain.{name}",
                found=found,
                allowed=SEALING_JAX,
                reason="Kernels are lowered with one version only, because another lowers to other bytes.",
            )
    if jnp.result_type(int) != jnp.int32:
        raise ToolchainMismatch(
            field="JAX_ENABLE_X64",
            found="64-bit types",
            allowed="unset, or 0",
            reason="The same lines then count in int64, which lowers to other bytes, and some to none.",
        )


def seal_program(
    region: str, version: str, constants: Mapping[str, int | float | bool | str], program: Program
) -> SealedProgram:
    """Lowers and seals every step of ``program``. Needs no card. Raises ToolchainMismatch, NotImplementedError."""
    check_sealing_toolchain()
    return SealedProgram(
        region=region,
        version=version,
        constants=tuple(sorted(constants.items())),
        buffers=dict(program.buffers),
        operands=program.operands,
        results=program.results,
        modules=tuple(_seal_step(step, program.buffers, fuses=region in FUSING) for step in program.steps),
    )


def _seal_step(step: Step, buffers: Mapping[str, Buffer], *, fuses: bool) -> SealedModule:
    operands = tuple(step.seen(name, buffers[name]).struct for name in step.operands)
    device = AbstractDevice(device_kind=DEVICE_KIND, num_cores=SM_COUNT, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(step.kernel, keep_unused=True).trace(*operands)
        lowered = traced.lower(lowering_platforms=("cuda",))
    found = tuple((tuple(out.shape), str(out.dtype)) for out in traced.out_info)
    results = [step.seen(name, buffers[name]) for name in step.results]
    declared = tuple((result.shape, result.dtype) for result in results)
    if found != declared:
        raise ValueError(f"step {step.name} returns {found}, but the program declares {declared}")
    call = _only_call(step.name, lowered.compiler_ir())
    if len(call.operands) != len(operands) or len(call.results) != len(step.results):
        # Semaphores and other device scratch would appear here as operands that must be zero at every launch.
        raise NotImplementedError(
            f"step {step.name} has {len(call.operands)} operands and {len(call.results)} results in its module, "
            f"{len(operands)} and {len(step.results)} declared; kernels with hidden device scratch can't be sealed"
        )
    config = call.attributes["mhlo.backend_config"]
    aliases = tuple(
        (step.operands.index(name), index) for index, name in enumerate(step.results) if name in step.operands
    )
    module = strip(config["module"].value_bytes, fuses=fuses)
    return SealedModule(step.name, module, step.operands, step.results, aliases)


def _only_call(name: str, module: Any) -> Any:
    calls = []
    for operation in _walk(module.operation):
        if operation.name == "stablehlo.custom_call":
            calls.append(operation)
        elif operation.name not in ("builtin.module", "func.func", "func.return", "return", "func.call", "call"):
            raise NotImplementedError(f"step {name} does more than launch one kernel: it contains {operation.name}")
    if len(calls) != 1 or calls[0].attributes["call_target_name"].value != MODULE_FORMAT:
        raise NotImplementedError(f"step {name} must contain exactly one {MODULE_FORMAT} call, not {len(calls)} calls")
    return calls[0]


def _walk(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


def strip(module: bytes, *, fuses: bool) -> bytes:
    """Removes what varies from one lowering to the next but is no numerics: debug locations and the dump's counter.

    Unless it ``fuses``, also the leave that Mosaic gives with every product, sum and difference to round two of them
    as one: which would be is the compiler's choice, and may be another one in another kernel.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import mosaic_gpu_dialect
    from jaxlib.mlir import ir, passmanager

    context = mlir.make_ir_context()
    mosaic_gpu_dialect.register_dialect(context)
    # The serialised form renames the dialects it uses, and those names are registered nowhere.
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        parsed = ir.Module.parse(module)
        if _DUMP_NAME in parsed.operation.attributes:
            del parsed.operation.attributes[_DUMP_NAME]
        if not fuses:
            with _not_looked_for(_NEVER_THERE):
                for operation in _walk(parsed.operation):
                    if _FAST_MATH in operation.attributes:
                        operation.attributes[_FAST_MATH] = ir.Attribute.parse("#arith.fastmath<none>")
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed.operation)
        buffer = io.BytesIO()
        parsed.operation.write_bytecode(buffer, desired_version=0)
    return buffer.getvalue()


@contextmanager
def _not_looked_for(names: Sequence[str]) -> Iterator[None]:
    """Importing these fails at once meanwhile, as it does after a look where they could be."""
    absent: dict[str, Any] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name) is None:
                sys.modules.pop(name, None)
