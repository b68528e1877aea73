"""Both attention forms for XLA:CPU: they differ only in where a block of keys is read.

T tokens, H query heads over K key heads, D head size; q query tile, b block of keys.
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.schedule import attend
from pallas_kernels.attention.spec import BLOCK, FEW_TOKENS, QUERY_TILE
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

    first_T, live_T = positions_T == 0, segment_ids_T >= 0
    # One tile size, since a second one is a second compilation of the schedule: hardly an item here is a single query.
    return (run_items(q_THD, positions_T, first_T, live_T, storage(v_TKD), read, scale, split, mixed=False),)


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
    block, page = min(BLOCK, split), k_cache.shape[1]
    run = gcd(block, page)
    k_rows, v_rows = _rows(k_cache), _rows(v_cache)
    starts_RS = run_starts(block_table_RP, page, run)

    def read(token: jax.Array, position: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
        where = (request_of_token_T[token], start // run)
        starts_s = lax.dynamic_slice(starts_RS, where, (1, block // run))[0]
        return _read_runs(k_rows, starts_s, run), _read_runs(v_rows, starts_s, run)

    live_T = request_of_token_T >= 0
    same_request_T = request_of_token_T[1:] == request_of_token_T[:-1]
    follows_T = same_request_T & (positions_T[1:] == positions_T[:-1] + 1)
    follows_T = jnp.concatenate([jnp.zeros(1, bool), follows_T])
    own_rows_T = starts_RS[request_of_token_T, positions_T // run] + positions_T % run
    own_values_TKD = _words(v_rows[own_rows_T])
    return (run_items(q_THD, positions_T, ~follows_T, live_T, own_values_TKD, read, scale, split, mixed=True),)


def run_starts(block_table_RP: jax.Array, page: int, run: int) -> jax.Array:
    """The cache row of every `run`-th position of a request: a run lies inside one page and one block.

    One block more than the table has pages, which a last block may reach into; its values are masked.
    """
    starts_RPS = block_table_RP[:, :, None] * page + jnp.arange(0, page, run, dtype=jnp.int32)
    starts_RS = starts_RPS.reshape(block_table_RP.shape[0], -1)
    return jnp.pad(starts_RS, ((0, 0), (0, BLOCK // run)))


def _rows(cache: jax.Array) -> jax.Array:
    """A cache as rows that can be cut: an int16 view as it is; bfloat16 becomes words, which costs a copy a call."""
    return storage(cache).reshape(-1, *cache.shape[2:])


def _read_runs(rows: jax.Array, starts_s: jax.Array, run: int) -> jax.Array:
    """The stored keys or values [b, K, D] of runs of rows."""
    if starts_s.shape[0] == 1:
        return _words(lax.dynamic_slice_in_dim(rows, starts_s[0], run))
    runs = jax.vmap(lambda start: lax.dynamic_slice_in_dim(rows, start, run))(starts_s)
    return _words(runs.reshape(-1, *rows.shape[1:]))


def _words(cut: jax.Array) -> jax.Array:
    """Storage of a cut of the cache. An int16 view is converted here and not before, where it would copy the cache."""
    return lax.bitcast_convert_type(cut, jnp.uint16) if cut.dtype == jnp.int16 else cut


def work_items(
    positions_T: jax.Array, first_T: jax.Array, live_T: jax.Array, v_TKD: jax.Array, tile: int
) -> tuple[jax.Array, jax.Array]:
    """Cuts tokens into items, at most `tile` tokens of one segment: their first tokens (T behind the last) and count.

    A token whose value holds NaN or infinity starts an item: its predecessors then never multiply it by zero. Every
    dead row is an item of its own.
    """
    tokens = positions_T.shape[0]
    broken_T = ~jnp.all(jnp.isfinite(widen(v_TKD)), axis=(1, 2))
    starts_T = first_T | ~live_T | (positions_T % tile == 0) | broken_T | (jnp.arange(tokens) == 0)
    index_T = jnp.cumsum(starts_T.astype(jnp.int32)) - 1
    slots_T = jnp.where(starts_T, index_T, tokens)
    first = jnp.full(tokens + 1, tokens, jnp.int32)
    return first.at[slots_T].min(jnp.arange(tokens, dtype=jnp.int32)), index_T[-1] + 1


def run_items(
    q_THD: jax.Array,
    positions_T: jax.Array,
    first_T: jax.Array,
    live_T: jax.Array,
    v_TKD: jax.Array,
    read: ReadItemBlock,
    scale: float,
    split: int,
    *,
    mixed: bool,
) -> jax.Array:
    """One item after the other; an item writes a whole tile, and its successors overwrite the rows behind its own.

    Dead rows read no key and give zero. mixed: many items are one query, for which there is a tile of its own beside
    the large one, as in a step that decodes some requests and prefills others. No bit depends on the tile.
    """
    tokens, heads, head = q_THD.shape
    key_heads, dtype = v_TKD.shape[1], q_THD.dtype
    group = heads // key_heads
    # A dot of a single row is summed in another order, so one query head a key head takes two queries.
    small, large = (1 if group > 1 else 2), QUERY_TILE
    if isinstance(tokens, int) and tokens <= FEW_TOKENS:
        large = small
    first, count = work_items(positions_T, first_T, live_T, v_TKD, large)
    zero = hidden_zero(q_THD)
    q_words = storage(q_THD)

    def item(number: jax.Array, out: jax.Array) -> jax.Array:
        own_zero = zero | trip_zero(number)
        token = first[number]
        position, queries = positions_T[token], first[number + 1] - token
        length = jnp.where(live_T[token], position + queries, 0)

        def tile(size: int) -> jax.Array:
            rows = jnp.minimum(token + jnp.arange(size), tokens - 1)
            q_qHD = pin(widen(q_words[rows]), own_zero)
            q_KmD = jnp.moveaxis(q_qHD.reshape(size, key_heads, group, head), 0, 1).reshape(key_heads, -1, head)
            position_m = jnp.repeat(position + jnp.arange(size), group)
            read_item = partial(read, token, position)
            out_KmD = attend(q_KmD, position_m, length, read_item, scale, split, dtype, own_zero)
            out_qHD = jnp.moveaxis(out_KmD.reshape(key_heads, size, group, head), 1, 0).reshape(size, heads, head)
            return jnp.pad(narrow(out_qHD, dtype), ((0, large - size), (0, 0), (0, 0)))

        if small == large:
            words_qHD = tile(small)
        elif mixed:
            words_qHD = lax.cond(queries <= small, lambda: tile(small), lambda: tile(large))
        else:
            dead = jnp.zeros((large, heads, head), q_words.dtype)
            words_qHD = lax.cond(length == 0, lambda: dead, lambda: tile(large))
        return lax.dynamic_update_slice_in_dim(out, words_qHD, token, 0)

    out = jnp.zeros((tokens + large, heads, head), storage_dtype(dtype))
    words_THD = lax.fori_loop(0, count + zero, item, out)[:tokens]
    return from_storage(jnp.where(live_T[:, None, None], words_THD, 0), dtype)
