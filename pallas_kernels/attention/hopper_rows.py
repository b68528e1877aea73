"""What one warpgroup of a tile computes on sm90: a sequence's splits, block by block, in the declared order."""

# Dimension letters: D head size, R rows of a warpgroup, B positions of a block.

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule, State


@dataclasses.dataclass(frozen=True)
class Stages:
    """Loaded blocks of keys or values, shared memory [stages, B, D], and the barriers that pass them on and back."""

    blocks: jax.Ref
    full: jax.Ref
    empty: jax.Ref
    count: int

    def slot(self, number: jax.Array) -> jax.Array:
        """Where the block is that was loaded as the ``number``th."""
        return lax.rem(number, jnp.int32(self.count))


class Extent(NamedTuple):
    """A sequence's blocks in a tile; ``before`` counts the blocks that were loaded before its first one.

    It has ``blocks``, of which it fills the first ``full``. All rows see the first ``unmasked`` of them, and a row sees
    positions up to ``limit_R``. ``over`` is above zero where the queries are not needed after it.
    """

    before: jax.Array
    blocks: jax.Array
    full: jax.Array
    unmasked: jax.Array
    limit_R: jax.Array
    over: jax.Array


@dataclasses.dataclass(frozen=True)
class Rows:
    """A warpgroup's queries, and what it shares with the loader and with the other warpgroup.

    ``clean`` says that a last block of values is loaded whose rest is zeroed. ``release`` says that the queries were
    read. Between ``take_turn`` and ``give_turn`` the tensor cores get this warpgroup's products: its softmax, and the
    joining of its splits, run under the other's.
    """

    schedule: Schedule
    q_RD: jax.Ref
    keys: Stages
    values: Stages
    clean: jax.Ref
    take_turn: Callable[[], None]
    give_turn: Callable[[], None]
    release: Callable[[], None]
    staged: jax.Ref | None

    @property
    def split_blocks(self) -> int:
        return self.schedule.split // self.schedule.block

    def splits(self, blocks: jax.Array) -> jax.Array:
        """How many splits so many blocks are."""
        return lax.div(blocks - 1, jnp.int32(self.split_blocks)) + 1

    def split(self, extent: Extent, number: jax.Array) -> State:
        """The state of one split."""
        first = number * self.split_blocks
        end = jnp.minimum(first + self.split_blocks, extent.blocks)
        middle = jnp.minimum(jnp.maximum(first, extent.unmasked), end)
        state = softmax.empty_state(self.schedule.D)
        self.take_turn()
        state = lax.fori_loop(first, middle, lambda b, s: self._block(extent, b, s, masked=False), state)
        state = lax.fori_loop(middle, end, lambda b, s: self._block(extent, b, s, masked=True), state)
        self.give_turn()
        return state

    def _block(self, extent: Extent, block: jax.Array, state: State, masked: bool) -> State:
        """The state after one more block; has the turn at its start and end."""
        B = self.schedule.block
        number = extent.before + block
        keys, values = self.keys.slot(number), self.values.slot(number)
        plgpu.barrier_wait(self.keys.full.at[keys])

        def product(acc: jax.Ref) -> jax.Array:
            plgpu.wgmma(acc, self.q_RD, self.keys.blocks.at[keys].transpose((1, 0)))
            self.give_turn()
            return acc[...]

        raw_RB = pl.run_scoped(product, plgpu.ACC((ROWS, B), jnp.float32))
        plgpu.barrier_arrive(self.keys.empty.at[keys])
        if masked:
            # Some row ends inside a sequence's last block, so that one is masked.
            pl.when((extent.over > 0) & (block == extent.blocks - 1))(self.release)
            column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=softmax.WGMMA)
            limit_RB = lax.broadcast_in_dim(extent.limit_R - block * B, (ROWS, B), (0,))
            raw_RB = jnp.where(column_RB <= limit_RB, raw_RB, -jnp.inf)
        state, weights = softmax.weigh(state, raw_RB, self.schedule.exponent_scale)
        pl.when(block < extent.full)(lambda: plgpu.barrier_wait(self.values.full.at[values]))
        pl.when(block >= extent.full)(lambda: plgpu.barrier_wait(self.clean.at[values]))
        # The whole softmax belongs before the turn, which the compiler does not know.
        max_R, sum_R, weights = lax.optimization_barrier((state.max_R, state.sum_R, weights))
        self.take_turn()
        state = State(max_R, sum_R, state.acc_RD)
        state = softmax.accumulate(state, weights, self.values.blocks.at[values], self.schedule.D, self.staged)
        plgpu.barrier_arrive(self.values.empty.at[values])
        return state
