"""SwiGLU on sm90: silu of the gate half times the up half, elementwise."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, elementwise_chunk
from pallas_kernels.program import Buffer, Program, Step


def swiglu_program(T: int, I: int) -> Program:  # noqa: E741  I is the intermediate size
    """``gate_up [T, 2*I] -> out [T, I]`` in bfloat16. Raises ValueError where I is no multiple of 128."""
    chunk, layout = elementwise_chunk(I)

    def kernel(gate_up_TI: jax.Ref, out_TI: jax.Ref) -> None:
        row, at = lax.axis_index("row"), lax.axis_index("chunk") * chunk
        gate = plgpu.load(gate_up_TI.at[row, pl.ds(at, chunk)], layout=layout).astype(jnp.float32)
        up = plgpu.load(gate_up_TI.at[row, pl.ds(at + I, chunk)], layout=layout).astype(jnp.float32)
        # silu is rounded before the product, as the Hugging Face reference does.
        silu = (gate / (1.0 + jnp.exp(-gate))).astype(jnp.bfloat16).astype(jnp.float32)
        out_TI[row, pl.ds(at, chunk)] = (silu * up).astype(jnp.bfloat16)

    call = chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, I), jnp.bfloat16),),
        grid=(T, I // chunk),
        grid_names=("row", "chunk"),
        kernel_name="isojax_swiglu",
    )
    buffers = {"gate_up": Buffer((T, 2 * I), "bfloat16"), "out": Buffer((T, I), "bfloat16")}
    return Program(buffers, ("gate_up",), ("out",), (Step("swiglu", call, ("gate_up",), ("out",)),))
