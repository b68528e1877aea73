"""The arithmetic of attention on sm90, shared by every kernel: one KV block, one split, the merge of splits."""

# Dimension letters: R query rows of a warpgroup (64), B positions of a KV block, D head size.
# All rows go through exactly these functions, whatever kernel holds them, so a row's bits depend on nothing else.

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64
WGMMA = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
#: Finite, so that nothing becomes NaN, and beyond what scores of bfloat16 queries and keys come near.
BEYOND_SCORES = 3e38


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What fixes the rounding of attention: head size, positions of a split, the scale of the scores."""

    D: int
    split: int
    scale: float

    def __post_init__(self) -> None:
        if self.D % 16 or not 16 <= self.D <= 256:
            raise ValueError(f"head size {self.D} is not a multiple of 16 up to 256")
        if self.split % self.block:
            raise ValueError(f"a split of {self.split} positions is not a multiple of its blocks of {self.block}")

    @property
    def block(self) -> int:
        """Positions of one KV block. Blocks are aligned at absolute position 0."""
        return 128 if self.D <= 128 else 64

    @property
    def exponent_scale(self) -> float:
        """Scores are scaled for powers of two, which the hardware computes."""
        return self.scale * math.log2(math.e)


class State(NamedTuple):
    """Running maximum (of scaled scores), sum and weighted values of some KV positions, one row a query row."""

    max_R: jax.Array
    sum_R: jax.Array
    acc_RD: jax.Array


def empty_state(D: int) -> State:
    """The state before any position: a no-op on every bit when merged."""
    return State(
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), PER_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, D), jnp.float32), WGMMA),
    )


def start_state(D: int, rows: int) -> State:
    """The empty state, whose rows from ``rows`` on are idle: no score reaches their maximum, so all weights are zero.

    Tensor cores draw less power for zeros than for what shared memory held, and a card at its power limit is faster.
    """
    empty = empty_state(D)
    row_R = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    return empty._replace(max_R=jnp.where(row_R < rows, empty.max_R, BEYOND_SCORES))


def without_idle(q_RD: jax.Array, rows: int) -> jax.Array:
    """The queries with zeros in the rows from ``rows`` on, for the same reason."""
    row_RD = plgpu.broadcasted_iota(jnp.int32, q_RD.shape, 0, layout=WGMMA)
    return jnp.where(row_RD < rows, q_RD, jnp.zeros((), q_RD.dtype))


def _beside(value_R: jax.Array, values: jax.Array) -> jax.Array:
    """A number of each row, shaped to meet the row's values; where a thread holds one column it already has it."""
    return value_R if values.ndim == 1 else value_R[:, None]


def _finite(max_R: jax.Array) -> jax.Array:
    # A row without any position yet has maximum -inf, and -inf - -inf would be NaN.
    return jnp.where(max_R == -jnp.inf, 0.0, max_R)


def scores(q_RD: jax.Ref, k_BD: jax.Ref, B: int) -> jax.Array:
    """Raw scores of one block, fp32; waits for the tensor cores."""

    def product(acc: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc, q_RD, k_BD.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((ROWS, B), jnp.float32))


class Weights(NamedTuple):
    """A block's weights, bfloat16, and by what the sums of the blocks before it shrink."""

    weights_RB: jax.Array
    shrink_R: jax.Array


def weigh(state: State, raw_RB: jax.Array, exponent_scale: float) -> tuple[State, Weights]:
    """Moves ``state`` to the new maximum and adds the block's sum; its values are still to come.

    Masked scores are -inf. A block whose scores are all masked changes no bit of a row.
    """
    max_R = jnp.maximum(state.max_R, jnp.max(raw_RB, axis=1) * exponent_scale)
    finite_R = _finite(max_R)
    weights_RB = jnp.exp2(raw_RB * exponent_scale - finite_R[:, None])
    shrink_R = jnp.exp2(state.max_R - finite_R)
    sum_R = state.sum_R * shrink_R + jnp.sum(weights_RB, axis=1)
    return State(max_R, sum_R, state.acc_RD), Weights(weights_RB.astype(jnp.bfloat16), shrink_R)


def accumulate(state: State, weights: Weights, v_BD: jax.Ref, D: int, staged_RB: jax.Ref | None = None) -> State:
    """Adds the block's weighted values, one wgmma chain from zero; waits for the tensor cores.

    The weights go to wgmma from registers, or through ``staged_RB`` in shared memory, which changes no bit: the GPU
    interpreter knows only that.
    """
    left = weights.weights_RB
    if staged_RB is not None:
        staged_RB[...] = left
        plgpu.commit_smem()
        left = staged_RB

    def product(acc: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc, left, v_BD)
        return acc[...]

    values_RD = pl.run_scoped(product, plgpu.ACC((ROWS, D), jnp.float32))
    return state._replace(acc_RD=state.acc_RD * weights.shrink_R[:, None] + values_RD)


class Rule(NamedTuple):
    """How two states join: which of them has the larger maximum, and by what the other one shrinks."""

    earlier_R: jax.Array
    shrink_R: jax.Array

    def values(self, total_RD: jax.Array, part_RD: jax.Array) -> jax.Array:
        """Joins the weighted values, or any columns of them.

        One of the two is scaled by exactly one, so only the other is multiplied: with two products in the sum, which
        of them the compiler fuses into the addition would decide the last bit.
        """
        earlier_RD = self.earlier_R
        if part_RD.ndim == 2:
            earlier_RD = lax.broadcast_in_dim(self.earlier_R, part_RD.shape, (0,))
        high_RD = jnp.where(earlier_RD, total_RD, part_RD)
        low_RD = jnp.where(earlier_RD, part_RD, total_RD)
        return high_RD + low_RD * _beside(self.shrink_R, low_RD)


def merge_sums(total_max_R: jax.Array, total_sum_R: jax.Array, part: State) -> tuple[jax.Array, jax.Array, Rule]:
    """Adds a later split to the maximum and sum of the earlier ones; the rule then joins the values."""
    max_R = jnp.maximum(total_max_R, part.max_R)
    earlier_R = total_max_R >= part.max_R
    shrink_R = jnp.exp2(jnp.minimum(total_max_R, part.max_R) - _finite(max_R))
    high_R = jnp.where(earlier_R, total_sum_R, part.sum_R)
    low_R = jnp.where(earlier_R, part.sum_R, total_sum_R)
    return max_R, high_R + low_R * shrink_R, Rule(earlier_R, shrink_R)


def merge(total: State, part: State) -> State:
    """Adds a later split's state to the total of the earlier ones."""
    max_R, sum_R, rule = merge_sums(total.max_R, total.sum_R, part)
    return State(max_R, sum_R, rule.values(total.acc_RD, part.acc_RD))


def finish(sum_R: jax.Array, acc_RD: jax.Array) -> jax.Array:
    """The attention output of some columns, bfloat16. Rows that attended to nothing are zero."""
    some_R = sum_R != 0.0
    scale_R = jnp.where(some_R, 1.0 / jnp.where(some_R, sum_R, 1.0), 0.0)
    # Adding zero turns a negative zero into a positive one: whether a vanished sum kept its sign depends on how many
    # fully masked blocks came after it.
    return (acc_RD * _beside(scale_R, acc_RD) + 0.0).astype(jnp.bfloat16)
