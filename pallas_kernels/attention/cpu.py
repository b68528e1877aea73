"""Both attention forms for XLA:CPU: they differ only in where a block of keys is read.

T tokens, H query heads over K key heads, D head size; q query tile, b block of keys.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.schedule import attend
from pallas_kernels.attention.spec import BLOCK, FEW_TOKENS, QUERY_TILES
from pallas_kernels.loops import hidden_zero, pin, trip_zero
from pallas_kernels.rounding import from_storage, narrow, storage, storage_dtype, widen


# (first token of an item, its position, first position of a block) to the block's stored keys and values [b, K, D]
ReadItemBlock = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def attention(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    positions_T: jax.Array,
    segment_ids_T: jax.Array,
    layer: jax.Array,
    *,
    scale: float,
    split: int,
) -> tuple[jax.Array]:
    """The packed form: a token's segment starts `position` tokens before it."""
    if 0 in q_THD.shape:
        return (jnp.zeros(q_THD.shape, q_THD.dtype),)
    block = min(BLOCK, split)
    k, v = (jnp.pad(storage(array), ((0, block), (0, 0), (0, 0))) for array in (k_TKD, v_TKD))

    def read(token: jax.Array, position: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = token - position + start
        return lax.dynamic_slice_in_dim(k, row, block), lax.dynamic_slice_in_dim(v, row, block)

    first_T = positions_T == 0
    return (run_items(q_THD, positions_T, first_T, storage(v_TKD), read, scale, split),)


def paged_attention(
    q_THD: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table_RP: jax.Array,
    request_of_token_T: jax.Array,
    positions_T: jax.Array,
    *,
    scale: float,
    split: int,
) -> tuple[jax.Array]:
    """The paged form: position p of request r is row p % page of page block_table[r, p // page]."""
    if 0 in q_THD.shape:
        return (jnp.zeros(q_THD.shape, q_THD.dtype),)
    page, key_heads, head = k_cache.shape[1:]
    block = min(BLOCK, split)
    pages_of_request = block_table_RP.shape[1]

    def rows_of(request: jax.Array, positions: jax.Array) -> jax.Array:
        # Positions behind the table are masked later; a request of -1 is a dead row, whose result is not used.
        column = jnp.minimum(positions // page, pages_of_request - 1)
        return block_table_RP[jnp.maximum(request, 0), column] * page + positions % page

    def rows(cache: jax.Array, index: jax.Array) -> jax.Array:
        words = lax.bitcast_convert_type(cache, jnp.uint16) if cache.dtype == jnp.int16 else storage(cache)
        return words.reshape(-1, key_heads, head)[index]

    def read(token: jax.Array, position: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = rows_of(request_of_token_T[token], start + jnp.arange(block, dtype=jnp.int32))
        return rows(k_cache, index), rows(v_cache, index)

    live_T = request_of_token_T >= 0
    same_request_T = request_of_token_T[1:] == request_of_token_T[:-1]
    follows_T = same_request_T & (positions_T[1:] == positions_T[:-1] + 1)
    first_T = ~live_T | ~jnp.concatenate([jnp.zeros(1, bool), follows_T])
    own_values_TKD = rows(v_cache, rows_of(request_of_token_T, positions_T))
    positions_T = jnp.where(live_T, positions_T, 0)
    out = run_items(q_THD, positions_T, first_T, own_values_TKD, read, scale, split)
    return (jnp.where(live_T[:, None, None], out, jnp.zeros((), out.dtype)),)


def query_tile(tokens: object) -> int:
    """Queries of one item; neutral for the bits."""
    return QUERY_TILES[0] if isinstance(tokens, int) and tokens <= FEW_TOKENS else QUERY_TILES[1]


def work_items(positions_T: jax.Array, first_T: jax.Array, v_TKD: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Cuts tokens into items of at most `tile` of one segment: the first token of each (T behind the last), and a count.

    A token whose value holds NaN or infinity starts an item: its predecessors then never multiply it by zero.
    """
    tokens = positions_T.shape[0]
    broken_T = ~jnp.all(jnp.isfinite(widen(v_TKD)), axis=(1, 2))
    starts_T = first_T | (positions_T % tile == 0) | broken_T | (jnp.arange(tokens) == 0)
    index_T = jnp.cumsum(starts_T.astype(jnp.int32)) - 1
    slots_T = jnp.where(starts_T, index_T, tokens)
    first = jnp.full(tokens + 1, tokens, jnp.int32)
    return first.at[slots_T].min(jnp.arange(tokens, dtype=jnp.int32)), index_T[-1] + 1


def run_items(
    q_THD: jax.Array,
    positions_T: jax.Array,
    first_T: jax.Array,
    v_TKD: jax.Array,
    read: ReadItemBlock,
    scale: float,
    split: int,
) -> jax.Array:
    """One item after the other; an item writes a whole tile, and its successors overwrite the rows behind its own."""
    tokens, heads, head = q_THD.shape
    key_heads, dtype, tile = v_TKD.shape[1], q_THD.dtype, query_tile(tokens)
    group = heads // key_heads
    first, count = work_items(positions_T, first_T, v_TKD, tile)
    zero = hidden_zero(q_THD)
    q_words = storage(q_THD)

    def item(number: jax.Array, out: jax.Array) -> jax.Array:
        own_zero = zero | trip_zero(number)
        token = first[number]
        position = positions_T[token]
        length = position + jnp.minimum(first[number + 1] - token, tile)
        rows = jnp.minimum(token + jnp.arange(tile), tokens - 1)
        q_qHD = pin(widen(q_words[rows]), own_zero)
        q_KmD = jnp.moveaxis(q_qHD.reshape(tile, key_heads, group, head), 0, 1).reshape(key_heads, -1, head)
        position_m = jnp.repeat(position + jnp.arange(tile), group)
        out_KmD = attend(q_KmD, position_m, length, partial(read, token, position), scale, split, dtype, own_zero)
        out_qHD = jnp.moveaxis(out_KmD.reshape(key_heads, tile, group, head), 1, 0).reshape(tile, heads, head)
        return lax.dynamic_update_slice_in_dim(out, narrow(out_qHD, dtype), token, 0)

    out = jnp.zeros((tokens + tile, heads, head), storage_dtype(dtype))
    return from_storage(lax.fori_loop(0, count + zero, item, out)[:tokens], dtype)
