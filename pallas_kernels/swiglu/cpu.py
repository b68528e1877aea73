"""SwiGLU for XLA:CPU, over fixed row tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import map_row_tiles, pin
from pallas_kernels.rounding import from_storage, round_to, storage


def swiglu(gate_up_T2I: jax.Array) -> tuple[jax.Array]:
    """The region's CPU form."""
    dtype, inner = gate_up_T2I.dtype, gate_up_T2I.shape[1] // 2
    if 0 in gate_up_T2I.shape:
        return (jnp.zeros((gate_up_T2I.shape[0], inner), dtype),)

    def tile(zero: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array]:
        # The pin keeps the last product inside exp and the + 1 two roundings.
        silu = gate / (pin(jnp.exp(-gate), zero) + jnp.float32(1.0))
        return (round_to(silu, dtype) * up,)

    # Cut into halves before the loop: with two reads of one array in its body, LLVM makes no vectors of exp.
    words = storage(gate_up_T2I)
    halves = [from_storage(words[:, half], dtype) for half in (slice(0, inner), slice(inner, None))]
    (y,) = map_row_tiles(tile, halves, [((inner,), dtype)])
    return (y,)
