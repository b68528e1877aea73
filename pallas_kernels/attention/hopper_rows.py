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

    def first_scores(self, extent: Extent) -> jax.Array:
        """Raw scores of a sequence's first block, fp32."""
        self.take_turn()
        return self._scores(extent, jnp.int32(0))[0]

    def split(
        self,
        extent: Extent,
        number: jax.Array,
        raw_RB: jax.Array,
        join: Callable[[State, bool], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Computes one split from the raw scores of its first block.

        Returns those of the next one's, under which ``join`` runs over its state, and what ``join`` returns. It is
        called once for a split that others follow and once for a last one, and told which.
        """
        B = self.schedule.block
        first = number * self.split_blocks
        end = jnp.minimum(first + self.split_blocks, extent.blocks)

        def one_block(block: jax.Array, state: State) -> State:
            return self._add(extent, block, self._scores(extent, block)[0], state)

        state = self._add(extent, first, raw_RB, softmax.empty_state(self.schedule.D))
        state = lax.fori_loop(first + 1, end, one_block, state)

        def last() -> tuple[jax.Array, tuple[jax.Array, ...]]:
            self.give_turn()
            nothing_RB = plgpu.layout_cast(jnp.zeros((ROWS, B), jnp.float32), softmax.WGMMA)
            return nothing_RB, join(state, True)

        return lax.cond(end < extent.blocks, lambda: self._scores(extent, end, lambda: join(state, False)), last)

    def _scores(
        self, extent: Extent, block: jax.Array, under: Callable[[], tuple[jax.Array, ...]] = tuple
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Raw scores of a block, and what ``under`` returns, which runs while they are computed. Gives the turn."""
        slot = self.keys.slot(extent.before + block)
        plgpu.barrier_wait(self.keys.full.at[slot])

        def product(acc: jax.Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            plgpu.wgmma(acc, self.q_RD, self.keys.blocks.at[slot].transpose((1, 0)))
            self.give_turn()
            result = under()
            return acc[...], result

        raw_RB, result = pl.run_scoped(product, plgpu.ACC((ROWS, self.schedule.block), jnp.float32))
        plgpu.barrier_arrive(self.keys.empty.at[slot])
        pl.when((extent.over > 0) & (block == extent.blocks - 1))(self.release)
        return raw_RB, result

    def _add(self, extent: Extent, block: jax.Array, raw_RB: jax.Array, state: State) -> State:
        """The state after one more block. Takes the turn."""
        B = self.schedule.block
        slot = self.values.slot(extent.before + block)

        def masked() -> jax.Array:
            # How far each row sees beyond a thread's own columns of the first eight. The compiler would look up again
            # for every column which thread it is, unless it has to take this as given.
            column = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 1, layout=softmax.WGMMA)
            ahead = lax.broadcast_in_dim(extent.limit_R - block * B, (ROWS, 8), (0,)) - column
            ahead = lax.optimization_barrier(ahead)
            parts = (jnp.where(ahead >= first, raw_RB[:, first : first + 8], -jnp.inf) for first in range(0, B, 8))
            return jnp.concatenate(tuple(parts), axis=1)

        raw_RB = lax.cond(block < extent.unmasked, lambda: raw_RB, masked)
        state, weights = softmax.weigh(state, raw_RB, self.schedule.exponent_scale)
        pl.when(block < extent.full)(lambda: plgpu.barrier_wait(self.values.full.at[slot]))
        pl.when(block >= extent.full)(lambda: plgpu.barrier_wait(self.clean.at[slot]))
        # The whole softmax belongs before the turn, which the compiler does not know.
        max_R, sum_R, weights = lax.optimization_barrier((state.max_R, state.sum_R, weights))
        self.take_turn()
        state = State(max_R, sum_R, state.acc_RD)
        state = softmax.accumulate(state, weights, self.values.blocks.at[slot], self.schedule.D, self.staged)
        plgpu.barrier_arrive(self.values.empty.at[slot])
        return state
