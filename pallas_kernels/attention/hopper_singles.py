"""Which tokens of a batch are the only ones of their requests on sm90: decode's loader finds them, chunk by chunk."""

# Dimension letters: T tokens, L tokens of a chunk.

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_parts import MOST_PARTS, Parts

#: TMA copies at most so many elements along a dimension.
COPIED = 256
#: Beyond every part's number.
NONE = 2**30


def scratch(L: int) -> tuple[object, ...]:
    """What `Singles` needs of a block: two chunks' lookups, neighbours, running sums, and the lookups' barriers."""
    return (
        plgpu.SMEM((2, 2, L), jnp.int32),
        plgpu.SMEM((L + 16,), jnp.int32),
        plgpu.SMEM((2 * L,), jnp.int32),
        plgpu.Barrier(num_arrivals=2 * pl.cdiv(L, COPIED), num_barriers=2),
    )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Single tokens of a chunk, whose first token is the batch's ``first_token``.

    ``first`` is the number of each one's first part within the chunk, int32 [L], NONE where a token is not single.
    ``parts`` and ``several`` count all parts of the chunk and its tokens that have several.
    """

    first_token: jax.Array
    index: jax.Array
    first: jax.Array
    parts: jax.Array
    several: jax.Array

    def holds(self, part: jax.Array) -> jax.Array:
        """The place in the chunk of the token that has this part, by its number within the chunk."""
        return jnp.max(jnp.where(self.first <= part, self.index, 0))


@dataclasses.dataclass(frozen=True)
class Singles:
    """Looks chunks up, in order: positions and owners, the next chunk's while one is worked on."""

    plan: Parts
    split: int
    positions_T: jax.Ref
    owners_T: jax.Ref
    lookup: jax.Ref
    neighbours: jax.Ref
    sums: jax.Ref
    looked: jax.Ref

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.plan.T, self.plan.L)

    @property
    def index(self) -> jax.Array:
        L = self.plan.L
        return plgpu.broadcasted_iota(jnp.int32, (L,), 0, layout=plgpu.Layout.WG_STRIDED((L,), vec_size=1))

    def start(self, chunk: jax.Array) -> None:
        """Begins to look up a chunk, if there is one, over the one but one before it."""
        L, slot = self.plan.L, lax.rem(chunk, jnp.int32(2))

        @pl.when(chunk < self.chunks)
        def _() -> None:
            for start in range(0, L, COPIED):
                for row, source_T in enumerate((self.positions_T, self.owners_T)):
                    source = source_T.at[pl.ds(chunk * L + start, min(L, COPIED))]
                    into = self.lookup.at[slot, row, pl.ds(start, min(L, COPIED))]
                    plgpu.copy_gmem_to_smem(source, into, self.looked.at[slot])

    def prepare(self) -> None:
        """Once, before the first chunk."""
        self.sums[pl.ds(0, self.plan.L)] = jnp.where(self.index < 0, self.index, 0)
        self.start(jnp.int32(0))

    def next_owner(self, chunk: jax.Array) -> jax.Array:
        """The owner of the first token after a chunk; of the last one where there is none."""
        return self.owners_T[jnp.minimum((chunk + 1) * self.plan.L, self.plan.T - 1)]

    def last_owner(self, chunk: jax.Array) -> jax.Array:
        """The owner of a chunk's last token."""
        return self.lookup[lax.rem(chunk, jnp.int32(2)), 1, self.plan.L - 1]

    def token(self, chunk: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Position and owner of the chunk's token ``at``."""
        slot = lax.rem(chunk, jnp.int32(2))
        return self.lookup[slot, 0, at], self.lookup[slot, 1, at]

    def before(self, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many parts the chunk's tokens before ``at`` have, and how many of those tokens have several."""
        packed = self.sums[self.plan.L - 1 + at]
        return lax.rem(packed, jnp.int32(MOST_PARTS)), lax.div(packed, jnp.int32(MOST_PARTS))

    def counts(self, chunk: jax.Array, prior: jax.Array, after: jax.Array) -> jax.Array:
        """How many parts each token has, int32 [L], zero where it is not single; waits for the lookup.

        ``prior`` and ``after`` are the owners of the chunk's neighbours.
        """
        T, L, index = self.plan.T, self.plan.L, self.index
        slot, first_token = lax.rem(chunk, jnp.int32(2)), chunk * L
        lane = plgpu.Layout.WG_STRIDED((L,), vec_size=1)
        plgpu.barrier_wait(self.looked.at[slot])
        position, owner = (plgpu.load(self.lookup.at[slot, row], layout=lane) for row in range(2))
        self.neighbours[pl.ds(1, L)] = owner
        self.neighbours[0] = prior
        self.neighbours[L + 1] = after
        plgpu.commit_smem()
        owner_before, owner_after = (plgpu.load(self.neighbours.at[pl.ds(at, L)], layout=lane) for at in (0, 2))
        starts = (index + first_token == 0) | (owner_before != owner)
        ends = (index + first_token == T - 1) | (owner_after != owner)
        single = (owner >= 0) & (index + first_token < T) & starts & ends
        each = 1 if self.plan.whole else lax.div(position, jnp.full((), self.split, jnp.int32)) + 1
        return jnp.where(single, each, 0)

    def number(self, chunk: jax.Array, count: jax.Array) -> Chunk:
        """Numbers the parts of a chunk that has ``counts``."""
        # Both numbers of a token are summed at once, as the digits of one.
        packed = count if self.plan.whole else count + jnp.where(count > 1, MOST_PARTS, 0)
        packed = self._sums(packed) - packed
        first = jnp.where(count > 0, lax.rem(packed, jnp.full((), MOST_PARTS, jnp.int32)), NONE)
        return Chunk(chunk * self.plan.L, self.index, first, *self.before(jnp.int32(min(self.plan.T, self.plan.L))))

    def _sums(self, total: jax.Array) -> jax.Array:
        """Running sums over a chunk's tokens; they stay in the upper half of ``sums``, below it are zeros."""
        L, tokens = self.plan.L, min(self.plan.T, self.plan.L)
        lane = plgpu.Layout.WG_STRIDED((L,), vec_size=1)
        self.sums[pl.ds(L, L)] = total
        plgpu.commit_smem()
        step = 1
        # Four at a time: what counts is how often everyone waits for everyone.
        while step < tokens:
            for shift in range(step, min(4 * step, tokens), step):
                total = total + plgpu.load(self.sums.at[pl.ds(L - shift, L)], layout=lane)
            # Everyone has to have read before anyone writes the next sums.
            plgpu.commit_smem()
            self.sums[pl.ds(L, L)] = total
            plgpu.commit_smem()
            step *= 4
        return total
