"""The residual sum on sm90: an elementwise kernel over the flat array."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, elementwise_chunk
from pallas_kernels.program import Buffer, Program, Step


def residual_add_program(T: int, H: int) -> Program:
    """``(x [T, H], residual [T, H]) -> out [T, H]`` in bfloat16: one fp32 add, one round."""
    chunk, layout = elementwise_chunk(T * H)

    def kernel(x_E: jax.Ref, residual_E: jax.Ref, out_E: jax.Ref) -> None:
        here = pl.ds(lax.axis_index("chunk") * chunk, chunk)
        x = plgpu.load(x_E.at[here], layout=layout).astype(jnp.float32)
        residual = plgpu.load(residual_E.at[here], layout=layout).astype(jnp.float32)
        out_E[here] = (x + residual).astype(jnp.bfloat16)

    call = chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * H,), jnp.bfloat16),),
        grid=(T * H // chunk,),
        grid_names=("chunk",),
        kernel_name="isojax_residual_add",
    )
    buffers = {name: Buffer((T, H), "bfloat16") for name in ("x", "residual", "out")}
    views = dict.fromkeys(buffers, (T * H,))
    step = Step("residual_add", call, ("x", "residual"), ("out",), views)
    return Program(buffers, ("x", "residual"), ("out",), (step,))
