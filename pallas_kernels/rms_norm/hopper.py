"""RMSNorm with and without the residual sum on sm90: one warpgroup a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_rows import Row
from pallas_kernels.hopper_tools import chained_kernel
from pallas_kernels.program import Buffer, Program, Step


def _normalise(row_H: jax.Array, weight_H: jax.Array, length: int, eps: float) -> jax.Array:
    variance = jnp.sum(row_H * row_H) * (1.0 / length)
    # Rounded before the weight is applied, as the Hugging Face reference does.
    normed_H = (row_H * lax.rsqrt(variance + eps)).astype(jnp.bfloat16)
    return normed_H.astype(jnp.float32) * weight_H


def rms_norm_program(T: int, H: int, *, eps: float) -> Program:
    """``(x [T, H], w [H]) -> out [T, H]`` in bfloat16."""
    row = Row(H)

    def kernel(x_TH: jax.Ref, w_H: jax.Ref, out_TH: jax.Ref, *scratch: jax.Ref) -> None:
        at = lax.axis_index("row")
        x_H, weight_H = row.load([(x_TH, at), (w_H, None)], scratch)
        row.store(_normalise(x_H, weight_H, H, eps), out_TH, at, scratch, 0)

    call = chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, H), jnp.bfloat16),),
        grid=(T,),
        grid_names=("row",),
        kernel_name="isojax_rms_norm",
        scratch_types=row.scratch(2),
    )
    buffers = {"x": Buffer((T, H), "bfloat16"), "w": Buffer((H,), "bfloat16"), "out": Buffer((T, H), "bfloat16")}
    return Program(buffers, ("x", "w"), ("out",), (Step("rms_norm", call, ("x", "w"), ("out",)),))


def add_rms_norm_program(T: int, H: int, *, eps: float) -> Program:
    """``(x [T, H], residual [T, H], w [H]) -> (normed [T, H], sum [T, H])`` in bfloat16."""
    row = Row(H)

    def kernel(
        x_TH: jax.Ref, residual_TH: jax.Ref, w_H: jax.Ref, normed_TH: jax.Ref, sum_TH: jax.Ref, *scratch: jax.Ref
    ) -> None:
        at = lax.axis_index("row")
        x_H, residual_H, weight_H = row.load([(x_TH, at), (residual_TH, at), (w_H, None)], scratch)
        # The sum is rounded once, before the variance: what is normed is what the next layer adds to.
        sum_H = (x_H + residual_H).astype(jnp.bfloat16)
        row.store(sum_H, sum_TH, at, scratch, 0)
        row.store(_normalise(sum_H.astype(jnp.float32), weight_H, H, eps), normed_TH, at, scratch, 1)

    whole = jax.ShapeDtypeStruct((T, H), jnp.bfloat16)
    call = chained_kernel(
        kernel,
        out_type=(whole, whole),
        grid=(T,),
        grid_names=("row",),
        kernel_name="isojax_add_rms_norm",
        scratch_types=row.scratch(3),
    )
    buffers = {name: Buffer((T, H), "bfloat16") for name in ("x", "residual", "normed", "sum")}
    buffers["w"] = Buffer((H,), "bfloat16")
    operands, results = ("x", "residual", "w"), ("normed", "sum")
    return Program(buffers, operands, results, (Step("add_rms_norm", call, operands, results),))
