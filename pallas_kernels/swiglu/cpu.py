"""SwiGLU for XLA:CPU, over fixed row tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import map_row_tiles, pin
from pallas_kernels.rounding import round_to


def swiglu(gate_up_T2I: jax.Array) -> tuple[jax.Array]:
    """The region's CPU form."""
    dtype, inner = gate_up_T2I.dtype, gate_up_T2I.shape[1] // 2
    if 0 in gate_up_T2I.shape:
        return (jnp.zeros((gate_up_T2I.shape[0], inner), dtype),)

    def tile(zero: jax.Array, gate_up_r2I: jax.Array) -> tuple[jax.Array]:
        gate, up = gate_up_r2I[:, :inner], gate_up_r2I[:, inner:]
        # The pin keeps the last product inside exp and the + 1 two roundings.
        silu = gate / (pin(jnp.exp(-gate), zero) + jnp.float32(1.0))
        return (round_to(silu, dtype) * up,)

    (y,) = map_row_tiles(tile, [gate_up_T2I], [((inner,), dtype)])
    return (y,)
