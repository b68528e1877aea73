"""Emits a sealed program from JAX: one custom call a module, with exactly the sealed bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.interpreters import mlir
from jax.core import ShapedArray
from jaxlib.mlir import ir

from pallas_kernels.program import Buffer
from pallas_kernels.seal import MODULE_FORMAT, SealedModule, SealedProgram


def emit(ctx: Any, program: SealedProgram, operands: Sequence[Any]) -> list[Any]:
    """The lowering rule's body: StableHLO values of the operands in, those of the results out."""
    values = dict(zip(program.operands, operands, strict=True))
    for module in program.modules:
        outputs = _custom_call(ctx, module, program, [values[name] for name in module.operands])
        values.update(zip(module.results, outputs, strict=True))
    return [values[name] for name in program.results]


def _custom_call(ctx: Any, module: SealedModule, program: SealedProgram, operands: Sequence[Any]) -> list[Any]:
    config = {
        # XLA takes this hash on trust as the kernel's identity, so it must be the one of these very bytes.
        "kernel_hash": ir.StringAttr.get(bytes.fromhex(module.sha256)),
        "module": ir.StringAttr.get(module.module),
        "use_custom_barrier": ir.BoolAttr.get(False),
        "skip_device_barrier": ir.BoolAttr.get(False),
        "uses_xla_collective_metadata": ir.BoolAttr.get(False),
    }

    def row_major(buffer: Buffer) -> list[int]:
        return list(reversed(range(len(buffer.shape))))

    inputs = [program.buffers[name] for name in module.operands]
    outputs = [program.buffers[name] for name in module.results]
    types = [mlir.aval_to_ir_type(ctx.module_context, ShapedArray(b.struct.shape, b.struct.dtype)) for b in outputs]
    call = mlir.custom_call(
        call_target_name=MODULE_FORMAT,
        result_types=types,
        operands=list(operands),
        operand_layouts=[row_major(buffer) for buffer in inputs],
        result_layouts=[row_major(buffer) for buffer in outputs],
        backend_config=config,
        operand_output_aliases=dict(module.aliases),
        api_version=4,
    )
    return list(call.results)
