"""The one schedule of attention: splits of blocks of keys, an online softmax in each, merged in ascending order.

K key heads, D head size, m rows of a key head's query tile (queries times group), b block of keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.spec import BLOCK
from pallas_kernels.loops import constant, divide, pin, tile_count, trip_zero
from pallas_kernels.rounding import LANES, round_to, row_sum, widen

# Reads the stored keys and values [b, K, D] of the block that starts at a position.
ReadBlock = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


class Softmax(NamedTuple):
    """The running state of an online softmax: maximum and sum [K, m], weighted values [K, m, D]."""

    maximum_Km: jax.Array
    total_Km: jax.Array
    values_KmD: jax.Array


def attend(
    q_KmD: jax.Array,
    position_m: jax.Array,
    length: jax.Array,
    read: ReadBlock,
    scale: float,
    split: int,
    dtype: Any,
    zero: jax.Array,
) -> jax.Array:
    """Attention of a query tile over positions below `length`, fp32, before its one round."""
    block = min(BLOCK, split)
    key_heads, rows, head = q_KmD.shape
    empty = Softmax(
        jnp.full((key_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((key_heads, rows), jnp.float32),
        jnp.zeros((key_heads, rows, head), jnp.float32),
    )

    def one_block(number: jax.Array, state: Softmax, split_start: jax.Array) -> Softmax:
        start = split_start + number * block
        keys, values = (visible_values(words, start, length, block) for words in read(start))
        updated = block_update(state, q_KmD, keys, values, position_m, start, scale, dtype, zero | trip_zero(number))
        return choose(position_m >= start, updated, state)

    def one_split(number: jax.Array, state: Softmax) -> Softmax:
        split_start = number * split
        blocks = tile_count(jnp.minimum(length - split_start, split), block)
        own = lax.fori_loop(0, blocks + zero, lambda n, s: one_block(n, s, split_start), empty)
        merged = choose(jnp.broadcast_to(number == 0, (rows,)), own, merge(state, own, zero | trip_zero(number)))
        return choose(position_m >= split_start, merged, state)

    state = lax.fori_loop(0, tile_count(length, split) + zero, one_split, empty)
    return divide(state.values_KmD, state.total_Km[..., None])


def visible_values(words_bKD: jax.Array, start: jax.Array, length: jax.Array, block: int) -> jax.Array:
    """fp32 values [K, b, D] of a stored block, zero from `length` on: what lies there may be NaN."""
    inside_b = start + jnp.arange(block) < length
    return jnp.moveaxis(jnp.where(inside_b[:, None, None], widen(words_bKD), 0.0), 1, 0)


def block_update(
    state: Softmax,
    q_KmD: jax.Array,
    k_KbD: jax.Array,
    v_KbD: jax.Array,
    position_m: jax.Array,
    start: jax.Array,
    scale: float,
    dtype: Any,
    zero: jax.Array,
) -> Softmax:
    """The state after one more block, for rows that see at least its first key."""
    visible_mb = (start + jnp.arange(k_KbD.shape[1]))[None, :] <= position_m[:, None]
    score = pin(pin(chain_dot(q_KmD, k_KbD, contract=2), zero) * constant(scale, zero), zero)
    score = jnp.where(visible_mb, score, -jnp.inf)
    maximum = jnp.maximum(state.maximum_Km, jnp.max(score, axis=-1))
    weight = jnp.where(visible_mb, pin(jnp.exp(score - maximum[..., None]), zero), 0.0)
    keep = pin(jnp.exp(state.maximum_Km - maximum), zero)
    values = pin(chain_dot(round_to(weight, dtype), v_KbD, contract=1), zero)
    return Softmax(
        maximum,
        pin(state.total_Km * keep, zero) + row_sum(weight),
        pin(state.values_KmD * keep[..., None], zero) + values,
    )


def chain_dot(left_Kmc: jax.Array, right: jax.Array, contract: int) -> jax.Array:
    """A dot a key head as one fused multiply-add chain: needs a result width that is a multiple of 64."""
    free = 3 - contract
    width = right.shape[free]
    padding = [(0, 0)] * 3
    padding[free] = (0, -width % LANES)
    dot = lax.dot_general(
        left_Kmc,
        jnp.pad(right, padding) if width % LANES else right,
        (((2,), (contract,)), ((0,), (0,))),
        lax.Precision.HIGHEST,
        jnp.float32,
    )
    return dot[..., :width]


def merge(state: Softmax, own: Softmax, zero: jax.Array) -> Softmax:
    """The split `own` after all earlier ones."""
    maximum = jnp.maximum(state.maximum_Km, own.maximum_Km)
    left, right = (pin(jnp.exp(part.maximum_Km - maximum), zero) for part in (state, own))
    return Softmax(
        maximum,
        pin(state.total_Km * left, zero) + pin(own.total_Km * right, zero),
        pin(state.values_KmD * left[..., None], zero) + pin(own.values_KmD * right[..., None], zero),
    )


def choose(rows_m: jax.Array, new: Softmax, old: Softmax) -> Softmax:
    """The new state on the chosen rows, the old one elsewhere."""
    return Softmax(
        jnp.where(rows_m, new.maximum_Km, old.maximum_Km),
        jnp.where(rows_m, new.total_Km, old.total_Km),
        jnp.where(rows_m[:, None], new.values_KmD, old.values_KmD),
    )
