"""QK-norm and RoPE for XLA:CPU, over fixed row tiles.

T tokens, H query heads, K key heads, D head size; r a row tile.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.loops import map_row_tiles, pin
from pallas_kernels.rms_norm.cpu import normalize
from pallas_kernels.rounding import from_storage, round_to, storage, widen


def rotate(x_rHD: jax.Array, cos_sin_rD: jax.Array, zero: jax.Array) -> jax.Array:
    """Rotates halves by the angles in fp32; every product and sum rounds on its own."""
    half = x_rHD.shape[-1] // 2
    cos, sin = cos_sin_rD[:, None, :half], cos_sin_rD[:, None, half:]
    a, b = x_rHD[..., :half], x_rHD[..., half:]
    first = pin(a * cos, zero) - pin(b * sin, zero)
    second = pin(b * cos, zero) + pin(a * sin, zero)
    return jnp.concatenate([first, second], axis=-1)


def cut_heads(qkv_TC: jax.Array, D: int, key_heads: int) -> list[jax.Array]:
    """Queries [T, H, D], keys and values [T, K, D] of a packed projection."""
    keys = qkv_TC.shape[1] - 2 * key_heads * D
    parts = jnp.split(qkv_TC, (keys, keys + key_heads * D), axis=1)
    return [part.reshape(part.shape[0], part.shape[1] // D, D) for part in parts]


def qk_norm_rope(
    qkv_TC: jax.Array,
    cos_sin_TD: jax.Array,
    q_norm_D: jax.Array | None = None,
    k_norm_D: jax.Array | None = None,
    *,
    key_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The region's CPU form."""
    q_THD, k_TKD, v_TKD = cut_heads(qkv_TC, cos_sin_TD.shape[1], key_heads)
    if 0 in qkv_TC.shape:
        return q_THD, k_TKD, v_TKD
    dtype = qkv_TC.dtype

    def one(zero: jax.Array, x: jax.Array, norm_D: jax.Array | None, cos_sin_rD: jax.Array) -> jax.Array:
        if norm_D is not None:
            x = round_to(normalize(x, widen(norm_D), eps, dtype, zero), dtype)
        return rotate(x, cos_sin_rD, zero)

    def tile(zero: jax.Array, q_rHD: jax.Array, k_rKD: jax.Array, cos_sin_rD: jax.Array) -> tuple[jax.Array, ...]:
        return one(zero, q_rHD, q_norm_D, cos_sin_rD), one(zero, k_rKD, k_norm_D, cos_sin_rD)

    results = [(q_THD.shape[1:], dtype), (k_TKD.shape[1:], dtype)]
    q, k = map_row_tiles(tile, [q_THD, k_TKD, cos_sin_TD], results)
    return q, k, v_TKD


def paged_qk_norm_rope(
    qkv_TC: jax.Array,
    cos_sin_TD: jax.Array,
    slots_T: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *norms: jax.Array,
    key_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The paged form: the same, then keys and values at their rows of the caches."""
    q_THD, *new = qk_norm_rope(qkv_TC, cos_sin_TD, *norms, key_heads=key_heads, eps=eps)

    def written(cache: jax.Array, rows_TKD: jax.Array) -> jax.Array:
        rows = storage(cache).reshape(-1, *cache.shape[2:])
        # A row behind the last is dropped.
        slots = jnp.where(slots_T < 0, rows.shape[0], slots_T)
        return from_storage(rows.at[slots].set(storage(rows_TKD), mode="drop").reshape(cache.shape), cache.dtype)

    k_cache, v_cache = (written(cache, rows) for cache, rows in zip((k_cache, v_cache), new, strict=True))
    return q_THD, k_cache, v_cache
