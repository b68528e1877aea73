"""QK-norm and RoPE for XLA:CPU, over fixed row tiles.

T tokens, H query heads, K key heads, D head size; r a row tile.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import hidden_zero, map_row_tiles, pin
from pallas_kernels.rms_norm.cpu import normalize


def rotate(x_rHD: jax.Array, cos_sin_rD: jax.Array, zero: jax.Array) -> jax.Array:
    """Rotates halves by the angles, one round at the end."""
    cos, sin = (half[:, None, :] for half in jnp.split(cos_sin_rD, 2, axis=-1))
    a, b = jnp.split(x_rHD.astype(jnp.float32), 2, axis=-1)
    first = pin(a * cos, zero) - pin(b * sin, zero)
    second = pin(b * cos, zero) + pin(a * sin, zero)
    return jnp.concatenate([first, second], axis=-1).astype(x_rHD.dtype)


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
    if q_THD.shape[0] == 0:
        return jnp.zeros(q_THD.shape, q_THD.dtype), jnp.zeros(k_TKD.shape, k_TKD.dtype)
    zero = hidden_zero(q_THD)

    def tile(q_rHD: jax.Array, k_rKD: jax.Array, cos_sin_rD: jax.Array) -> tuple[jax.Array, jax.Array]:
        if q_norm_D is not None and k_norm_D is not None:
            q_rHD, k_rKD = normalize(q_rHD, q_norm_D, eps, zero), normalize(k_rKD, k_norm_D, eps, zero)
        return rotate(q_rHD, cos_sin_rD, zero), rotate(k_rKD, cos_sin_rD, zero)

    results = [(q_THD.shape[1:], q_THD.dtype), (k_TKD.shape[1:], k_TKD.dtype)]
    q, k = map_row_tiles(tile, [q_THD, k_TKD, cos_sin_TD], results, zero)
    return q, k
