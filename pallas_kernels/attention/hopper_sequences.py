"""Which sequences a tile of tokens holds on sm90: its loader finds them, and tells the warpgroups one by one."""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_source import ROW_STEP

#: Tokens whose sequence and position a block looks up at once.
LOOKUP = 128
#: In place of an owner: no sequence follows.
NONE = 2**30
#: Every warp holds all of the looked-up array, so that its reductions need no other warp.
LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((LOOKUP,), (32,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
#: Where in the loader's notes the plan is. Before it are the owners of a tile's tokens and of their two neighbours.
PLAN = LOOKUP + 16
#: Numbers that `Plan` and `find_sequences` share, int32.
NOTES = 2 * LOOKUP


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a tile: position, owner and place in the tile of each looked-up token, int32 [LOOKUP].

    ``inside`` marks the tokens that are the tile's, ``mine`` those that it computes; ``first_token`` is the batch's row
    of the first one.
    """

    first_token: jax.Array
    index: jax.Array
    position: jax.Array
    owner: jax.Array
    inside: jax.Array
    mine: jax.Array

    def after(self, owner: jax.Array | int) -> jax.Array:
        """The next larger owner, or NONE."""
        return -jnp.max(jnp.where(self.mine & (self.owner > owner), -self.owner, -NONE))

    def last_position(self, owner: jax.Array) -> jax.Array:
        """The position of the owner's last token in the tile."""
        return jnp.max(jnp.where(self.mine & (self.owner == owner), self.position, -1))

    def padding(self) -> jax.Array:
        """One where the tile has a token of nobody, else zero."""
        return jnp.max(jnp.where(self.inside & (self.owner < 0), 1, 0))

    def first_row(self, owner: jax.Array) -> jax.Array:
        """The batch's row of position 0, if the batch holds it: as many rows back as a token's position says."""
        back = jnp.where(self.mine & (self.owner == owner), self.index - self.position, -NONE)
        return self.first_token + jnp.max(back)


def find_sequences(
    positions_T: jax.Ref,
    owners_T: jax.Ref,
    lookup: jax.Ref,
    looked: jax.Ref,
    notes: jax.Ref,
    first_token: jax.Array,
    tile: int,
    single_tokens: bool,
) -> Sequences:
    """The sequences of the ``tile`` tokens from ``first_token`` on, whose positions and owners it puts into ``lookup``.

    Without ``single_tokens`` those with only one token in the whole batch are left out.
    """
    (T,) = owners_T.shape
    for row, source_T in enumerate((positions_T, owners_T)):
        plgpu.copy_gmem_to_smem(source_T.at[pl.ds(first_token, LOOKUP)], lookup.at[row], looked)
    # While those are on their way.
    prior, following = (
        owners_T[row] for row in (jnp.maximum(first_token - 1, 0), jnp.minimum(first_token + LOOKUP, T - 1))
    )
    plgpu.barrier_wait(looked)
    index = plgpu.broadcasted_iota(jnp.int32, (LOOKUP,), 0, layout=LANES)
    position, owner = (plgpu.load(lookup.at[row], layout=LANES) for row in range(2))
    inside = (index < tile) & (index + first_token < T)
    mine = inside & (owner >= 0)
    if not single_tokens:
        mine = mine & (_alone(lookup, notes, prior, following, first_token, T) == 0)
    return Sequences(first_token, index, position, owner, inside, mine)


def _alone(
    lookup: jax.Ref, notes: jax.Ref, prior: jax.Array, following: jax.Array, first_token: jax.Array, T: int
) -> jax.Array:
    """One where a token is the only one of its owner in the batch, else zero, int32 [LOOKUP].

    ``prior`` and ``following`` are the owners of the looked-up tokens' neighbours.
    """
    # One element a thread: the copies of `LANES` go through ldmatrix and stmatrix, whose rows start at multiples of 16
    # bytes, and neighbours do not.
    layout = plgpu.Layout.WG_STRIDED((LOOKUP,), vec_size=1)
    index = plgpu.broadcasted_iota(jnp.int32, (LOOKUP,), 0, layout=layout)
    owner = plgpu.load(lookup.at[1], layout=layout)
    notes[pl.ds(1, LOOKUP)] = owner
    notes[0] = prior
    notes[LOOKUP + 1] = following
    # A thread reads what others wrote, here and below, and nothing else makes it wait for them.
    plgpu.commit_smem()
    before, after = (plgpu.load(notes.at[pl.ds(at, LOOKUP)], layout=layout) for at in (0, 2))
    starts = (index + first_token == 0) | (before != owner)
    ends = (index + first_token == T - 1) | (after != owner)
    plgpu.commit_smem()
    notes[pl.ds(0, LOOKUP)] = jnp.where(starts & ends, 1, 0)
    plgpu.commit_smem()
    return plgpu.load(notes.at[pl.ds(0, LOOKUP)], layout=LANES)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Tells the warpgroups the next sequence: its owner, its last position, whether its rows are misaligned and whether
    it is the tile's last, after which the next head's first one follows.

    A head without any has NONE, and in place of a position whether the tile has padding.

    ``planned`` is the loader's barrier, ``taken`` that of the warpgroups, which lets the loader write the next one.
    """

    notes: jax.Ref
    planned: jax.Ref
    taken: jax.Ref

    def publish(
        self,
        number: jax.Array,
        owner: jax.Array | int,
        last: jax.Array | int,
        first_row: jax.Array | int = 0,
        following: jax.Array | int = NONE,
    ) -> None:
        """The loader's side. ``number`` counts what was published before; ``following`` is the next owner."""

        @pl.when(number > 0)
        def _() -> None:
            plgpu.barrier_wait(self.taken)

        self.notes[PLAN] = jnp.int32(owner)
        self.notes[PLAN + 1] = jnp.int32(last)
        self.notes[PLAN + 2] = lax.rem(jnp.int32(first_row), jnp.int32(ROW_STEP))
        self.notes[PLAN + 3] = jnp.where(jnp.int32(following) == NONE, 1, 0)
        plgpu.barrier_arrive(self.planned)

    def take(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The warpgroups' side: (owner or NONE, last position or padding, rows beyond a multiple of ROW_STEP, ends)."""
        plgpu.barrier_wait(self.planned)
        owner, last, misaligned, ends = (self.notes[PLAN + place] for place in range(4))
        plgpu.barrier_arrive(self.taken)
        return owner, last, misaligned, ends
