"""SwiGLU for XLA:CPU, over fixed row tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import hidden_zero, map_row_tiles, pin


def swiglu(gate_up_T2I: jax.Array) -> tuple[jax.Array]:
    """The region's CPU form."""
    dtype, inner = gate_up_T2I.dtype, gate_up_T2I.shape[1] // 2
    if 0 in gate_up_T2I.shape:
        return (jnp.zeros((gate_up_T2I.shape[0], inner), dtype),)
    zero = hidden_zero(gate_up_T2I)

    def tile(gate_up_r2I: jax.Array) -> tuple[jax.Array]:
        gate, up = (half.astype(jnp.float32) for half in jnp.split(gate_up_r2I, 2, axis=1))
        # The pin keeps exp's last product and the + 1 two roundings.
        silu = (gate / (pin(jnp.exp(-gate), zero) + 1.0)).astype(dtype)
        return ((silu.astype(jnp.float32) * up).astype(dtype),)

    (y,) = map_row_tiles(tile, [gate_up_T2I], [((inner,), dtype)], zero)
    return (y,)
