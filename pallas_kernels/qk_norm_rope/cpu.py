"""QK-norm and RoPE for XLA:CPU, over fixed row tiles.

T tokens, H query heads, K key heads, D head size; r a row tile.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import map_row_tiles, pin
from pallas_kernels.rms_norm.cpu import normalize
from pallas_kernels.rounding import round_to, widen


def rotate(x_rHD: jax.Array, cos_sin_rD: jax.Array, zero: jax.Array) -> jax.Array:
    """Rotates halves by the angles in fp32; every product and sum rounds on its own."""
    half = x_rHD.shape[-1] // 2
    cos, sin = cos_sin_rD[:, None, :half], cos_sin_rD[:, None, half:]
    a, b = x_rHD[..., :half], x_rHD[..., half:]
    first = pin(a * cos, zero) - pin(b * sin, zero)
    second = pin(b * cos, zero) + pin(a * sin, zero)
    return jnp.concatenate([first, second], axis=-1)


def qk_norm_rope(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    cos_sin_TD: jax.Array,
    q_norm_D: jax.Array | None = None,
    k_norm_D: jax.Array | None = None,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """The region's CPU form."""
    if 0 in q_THD.shape or 0 in k_TKD.shape:
        return jnp.zeros(q_THD.shape, q_THD.dtype), jnp.zeros(k_TKD.shape, k_TKD.dtype)
    dtype = q_THD.dtype

    def one(zero: jax.Array, x: jax.Array, norm_D: jax.Array | None, cos_sin_rD: jax.Array) -> jax.Array:
        if norm_D is not None:
            x = round_to(normalize(x, widen(norm_D), eps, dtype, zero), dtype)
        return rotate(x, cos_sin_rD, zero)

    def tile(zero: jax.Array, q_rHD: jax.Array, k_rKD: jax.Array, cos_sin_rD: jax.Array) -> tuple[jax.Array, ...]:
        return one(zero, q_rHD, q_norm_D, cos_sin_rD), one(zero, k_rKD, k_norm_D, cos_sin_rD)

    results = [(q_THD.shape[1:], dtype), (k_TKD.shape[1:], dtype)]
    q, k = map_row_tiles(tile, [q_THD, k_TKD, cos_sin_TD], results)
    return q, k
