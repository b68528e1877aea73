"""Both attention forms for XLA:CPU: they differ only in where a block of keys is read.

T tokens, H query heads over K key heads, D head size; q query tile, m rows of a key head's tile (q times H / K), b block.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.spec import BLOCK, QUERY_TILE
from pallas_kernels.loops import hidden_zero, pin

# Reads a block: (first token of the item, its position, first position of the block) to keys and values [b, K, D].
ReadBlock = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Softmax(NamedTuple):
    """The running state of an online softmax: maximum and sum [K, m], weighted values [K, m, D]."""

    maximum_Km: jax.Array
    total_Km: jax.Array
    values_KmD: jax.Array


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
    k, v = (jnp.pad(array, ((0, block), (0, 0), (0, 0))) for array in (k_TKD, v_TKD))

    def read(token: jax.Array, position: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = token - position + start
        return lax.dynamic_slice_in_dim(k, row, block), lax.dynamic_slice_in_dim(v, row, block)

    items = work_items(positions_T, positions_T == 0, v_TKD)
    return (run_items(q_THD, positions_T, items, read, k_TKD.shape[1], scale, split, q_THD.dtype),)


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
        values = cache.reshape(-1, key_heads, head)[index]
        return lax.bitcast_convert_type(values, q_THD.dtype) if cache.dtype == jnp.int16 else values

    def read(token: jax.Array, position: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = rows_of(request_of_token_T[token], start + jnp.arange(block, dtype=jnp.int32))
        return rows(k_cache, index), rows(v_cache, index)

    previous = jnp.concatenate([jnp.full(1, -1, request_of_token_T.dtype), request_of_token_T[:-1]])
    before = jnp.concatenate([jnp.full(1, -1, positions_T.dtype), positions_T[:-1]])
    first = (request_of_token_T != previous) | (positions_T != before + 1) | (request_of_token_T < 0)
    items = work_items(positions_T, first, rows(v_cache, rows_of(request_of_token_T, positions_T)))
    out = run_items(q_THD, positions_T, items, read, key_heads, scale, split, q_THD.dtype)
    return (jnp.where((request_of_token_T < 0)[:, None, None], jnp.zeros((), q_THD.dtype), out),)


def work_items(positions_T: jax.Array, first_T: jax.Array, v_TKD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cuts tokens into items of at most a query tile of one segment: first token of each (T behind the last), count.

    A token whose value holds NaN or infinity starts an item: its predecessors then never multiply it by zero.
    """
    tokens = positions_T.shape[0]
    broken_T = ~jnp.all(jnp.isfinite(v_TKD), axis=(1, 2))
    starts_T = first_T | (positions_T % QUERY_TILE == 0) | broken_T
    starts_T = starts_T | (jnp.arange(tokens) == 0)
    index_T = jnp.cumsum(starts_T.astype(jnp.int32)) - 1
    slots_T = jnp.where(starts_T, index_T, tokens)
    first = jnp.full(tokens + 1, tokens, jnp.int32)
    first = first.at[slots_T].min(jnp.arange(tokens, dtype=jnp.int32), mode="drop")
    return first, index_T[-1] + 1


def run_items(
    q_THD: jax.Array,
    positions_T: jax.Array,
    items: tuple[jax.Array, jax.Array],
    read: ReadBlock,
    key_heads: int,
    scale: float,
    split: int,
    dtype: jnp.dtype,
) -> jax.Array:
    """One item after the other; an item writes a whole tile, and its successors overwrite the rows behind its own."""
    tokens, heads, head = q_THD.shape
    group = heads // key_heads
    first, count = items
    zero = hidden_zero(q_THD)

    def item(number: jax.Array, out: jax.Array) -> jax.Array:
        token = first[number]
        position = positions_T[token]
        length = position + jnp.minimum(first[number + 1] - token, QUERY_TILE)
        rows = jnp.minimum(token + jnp.arange(QUERY_TILE), tokens - 1)
        q_KmD = jnp.moveaxis(q_THD[rows].reshape(QUERY_TILE, key_heads, group, head), 0, 1)
        q_KmD = q_KmD.reshape(key_heads, QUERY_TILE * group, head).astype(jnp.float32)
        position_m = jnp.repeat(position + jnp.arange(QUERY_TILE), group)
        tile_KmD = attend(q_KmD, position_m, length, partial(read, token, position), scale, split, dtype, zero)
        tile = jnp.moveaxis(tile_KmD.reshape(key_heads, QUERY_TILE, group, head), 1, 0)
        return lax.dynamic_update_slice_in_dim(out, tile.reshape(QUERY_TILE, heads, head), token, 0)

    out = jnp.zeros((tokens + QUERY_TILE, heads, head), dtype)
    return lax.fori_loop(0, count + zero, item, out)[:tokens]


def attend(
    q_KmD: jax.Array,
    position_m: jax.Array,
    length: jax.Array,
    read: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    scale: float,
    split: int,
    dtype: jnp.dtype,
    zero: jax.Array,
) -> jax.Array:
    """The schedule: splits in ascending order, blocks inside a split, one division and one round."""
    block = min(BLOCK, split)
    key_heads, rows, head = q_KmD.shape
    empty = Softmax(
        jnp.full((key_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((key_heads, rows), jnp.float32),
        jnp.zeros((key_heads, rows, head), jnp.float32),
    )

    def one_block(number: jax.Array, state: Softmax, first_position: jax.Array) -> Softmax:
        start = first_position + number * block
        k_bKD, v_bKD = read(start)
        return block_update(q_KmD, position_m, length, start, k_bKD, v_bKD, state, scale, dtype, zero)

    def one_split(number: jax.Array, state: Softmax) -> Softmax:
        first_position = number * split
        blocks = (jnp.minimum(length - first_position, split) + block - 1) // block
        own = lax.fori_loop(0, blocks + zero, lambda n, s: one_block(n, s, first_position), empty)
        return choose(position_m >= first_position, merge(state, own, number == 0, zero), state)

    state = lax.fori_loop(0, (length + split - 1) // split + zero, one_split, empty)
    return (state.values_KmD / state.total_Km[..., None]).astype(dtype)


def block_update(
    q_KmD: jax.Array,
    position_m: jax.Array,
    length: jax.Array,
    start: jax.Array,
    k_bKD: jax.Array,
    v_bKD: jax.Array,
    state: Softmax,
    scale: float,
    dtype: jnp.dtype,
    zero: jax.Array,
) -> Softmax:
    """Takes one block of keys into the state; rows that see none of it keep their state, bit for bit."""
    position_b = start + jnp.arange(k_bKD.shape[0], dtype=jnp.int32)
    inside_b = (position_b < length)[:, None, None]
    k_KbD, v_KbD = (jnp.moveaxis(jnp.where(inside_b, array.astype(jnp.float32), 0.0), 1, 0) for array in (k_bKD, v_bKD))
    visible_mb = position_b[None, :] <= position_m[:, None]
    dot = lax.dot_general(q_KmD, k_KbD, (((2,), (2,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)
    score = jnp.where(visible_mb, pin(dot * pin(jnp.float32(scale), zero), zero), -jnp.inf)
    maximum = jnp.maximum(state.maximum_Km, jnp.max(score, axis=-1))
    weight = jnp.where(visible_mb, pin(jnp.exp(score - maximum[..., None]), zero), 0.0)
    keep = pin(jnp.exp(state.maximum_Km - maximum), zero)
    rounded = weight.astype(dtype).astype(jnp.float32)
    values = lax.dot_general(rounded, v_KbD, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST)
    updated = Softmax(
        maximum,
        pin(state.total_Km * keep, zero) + jnp.sum(weight, axis=-1),
        pin(state.values_KmD * keep[..., None], zero) + values,
    )
    return choose(position_m >= start, updated, state)


def merge(state: Softmax, own: Softmax, first: jax.Array, zero: jax.Array) -> Softmax:
    """The split `own` after all earlier ones; the first split is taken as it is."""
    maximum = jnp.maximum(state.maximum_Km, own.maximum_Km)
    left, right = (pin(jnp.exp(part.maximum_Km - maximum), zero) for part in (state, own))
    merged = Softmax(
        maximum,
        pin(state.total_Km * left, zero) + pin(own.total_Km * right, zero),
        pin(state.values_KmD * left[..., None], zero) + pin(own.values_KmD * right[..., None], zero),
    )
    return Softmax(*(jnp.where(first, a, b) for a, b in zip(own, merged, strict=True)))


def choose(rows_m: jax.Array, new: Softmax, old: Softmax) -> Softmax:
    """The new state on the chosen rows, the old one elsewhere."""
    return Softmax(
        jnp.where(rows_m, new.maximum_Km, old.maximum_Km),
        jnp.where(rows_m, new.total_Km, old.total_Km),
        jnp.where(rows_m[:, None], new.values_KmD, old.values_KmD),
    )
