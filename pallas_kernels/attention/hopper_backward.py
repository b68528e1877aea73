"""The packed attention's backward on sm90: one kernel for queries, one for keys and values, no sum across blocks."""

# Dimension letters: T tokens, H query heads, K key heads, D head size.
#
# Both kernels cut the packed rows at absolute multiples of a tile, whatever sequences lie there: a row's sequence is
# the rows from its start on, so a query sees the keys from its own start up to itself. Each result is summed by one
# warpgroup in one order, which makes the gradients the same in every run.
# Source: Dao 2023, FlashAttention-2, algorithm 2, split in two kernels; the first normalises its weights at the end, so
# that one pass over the keys gives the queries' gradient and the log-sum-exp that the second needs.

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.hopper_backward_keys import key_kernel
from pallas_kernels.attention.hopper_backward_products import TILE
from pallas_kernels.attention.hopper_backward_queries import query_kernel

#: Rows that a warpgroup meets in a step. One of keys keeps two sums in registers, so its steps are smaller.
KEY_BLOCK, QUERY_BLOCK = 128, 64


def hopper_gradients(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    positions_T: jax.Array,
    segment_ids_T: jax.Array,
    out_THD: jax.Array,
    cotangent_THD: jax.Array,
    *,
    scale: float,
    key_block: int = KEY_BLOCK,
    query_block: int = QUERY_BLOCK,
    staged_weights: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of q, k and v, bfloat16, of `pallas_kernels.attention`'s operands, result and cotangent.

    key_block, query_block: keys that a warpgroup of queries meets in a step, and queries that one of keys meets; they
    divide 128. staged_weights: wgmma's left operands go through shared memory, which is all that the GPU
    interpreter knows.
    Raises NotImplementedError for operands that are not bfloat16, head sizes beyond 128, or T not a multiple of 128.
    """
    T, H, D = q_THD.shape
    K = k_TKD.shape[1]
    if q_THD.dtype != jnp.bfloat16 or D % 16 or D > 128 or T % TILE:
        raise NotImplementedError(
            f"attention's backward on sm90 takes bfloat16, head sizes in steps of 16 up to 128 and tokens in steps of "
            f"{TILE}; got {q_THD.dtype}, {D} and {T}"
        )
    mean_HT = jnp.sum(cotangent_THD.astype(jnp.float32) * out_THD.astype(jnp.float32), axis=-1).T
    start_T = jnp.arange(T, dtype=jnp.int32) - positions_T
    tiles = jnp.arange(T // TILE, dtype=jnp.int32) * TILE
    # Starts never fall from row to row, so a tile's first row decides which keys it begins with, and the queries of a
    # tile of keys end before the first block whose first row starts behind the tile.
    first_block = start_T[::TILE] // key_block
    end_block = jnp.sum(start_T[None, ::query_block] < (tiles + TILE)[:, None], axis=1, dtype=jnp.int32)
    # Padding rows give a constant zero: they see no key.
    start_T = jnp.where(segment_ids_T < 0, T, start_T)
    q_TC, g_TC = (a.reshape(T, H * D) for a in (q_THD, cotangent_THD))
    k_TC, v_TC = (a.reshape(T, K * D) for a in (k_TKD, v_TKD))
    queries = query_kernel(T, H, K, D, key_block, scale=scale, staged_weights=staged_weights)
    keys = key_kernel(T, H, K, D, query_block, scale=scale, staged_weights=staged_weights)
    g_q, log_sum_HT = queries(q_TC, k_TC, v_TC, g_TC, mean_HT, start_T, first_block)
    g_k, g_v = keys(q_TC, k_TC, v_TC, g_TC, mean_HT, log_sum_HT, start_T, end_block)
    return g_q.reshape(T, H, D), g_k.reshape(T, K, D), g_v.reshape(T, K, D)
