"""Where attention kernels read keys and values: packed rows, or pages behind a block table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

#: Copies into swizzled shared memory start at rows that are multiples of this.
ROW_STEP = 8
#: Warps of a warpgroup.
WARPS = 4


@dataclasses.dataclass(frozen=True)
class Packed:
    """Keys and values of the batch's own tokens, k, v [T, K*D]: a sequence's rows are contiguous.

    Every sequence must start at a row that is a multiple of ROW_STEP.
    """

    block: int

    @property
    def arrivals(self) -> int:
        """Copies that fill one block."""
        return 1

    @property
    def early(self) -> bool:
        """Nothing is looked up."""
        return False

    def pages(self, table: None, owner: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """Nothing."""
        return []

    def rows(self, pages: list[jax.Array], first_row: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """The row at which the block of positions from ``start`` on begins; position 0 is in ``first_row``."""
        return [pl.multiple_of(first_row + start, ROW_STEP)]

    def load(self, source: jax.Ref, rows: list[jax.Array], columns: pl.Slice, slot: jax.Ref, full: jax.Ref) -> None:
        """Loads one block; each copy arrives at ``full``."""
        _copy_pieces(source, rows, columns, slot, full, self.block)


@dataclasses.dataclass(frozen=True)
class Loads:
    """How a block's pages are fetched. None of it moves a bit.

    With ``spread`` the loader's four warps issue a block's copies side by side; else its warpgroup issues one after the
    other, all its threads in step before each. With ``early`` a block's pages are looked up while the one before it is
    loaded. With ``skip`` no copy is made of pages beyond a sequence's last one; else that one is copied again.
    """

    spread: bool = False
    early: bool = False
    skip: bool = False


@dataclasses.dataclass(frozen=True)
class Paged:
    """A cache of pages, k, v [pages * page, K*D], found through ``block_table`` [requests, pages of a request]."""

    block: int
    page: int
    loads: Loads = Loads()

    def __post_init__(self) -> None:
        if self.page % ROW_STEP:
            raise ValueError(f"pages of {self.page} positions are not a multiple of {ROW_STEP}")
        if self.block % self.page and self.page % self.block:
            raise ValueError(f"pages of {self.page} positions neither divide blocks of {self.block} nor the reverse")

    @property
    def arrivals(self) -> int:
        """Copies that fill one block."""
        return max(1, self.block // self.page)

    @property
    def early(self) -> bool:
        """Whether a block's pages are looked up while the block before it is loaded."""
        return self.loads.early

    def pages(self, table: jax.Ref, owner: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """The pages of the block of positions from ``start`` on. Where it has pages beyond ``last``, that one's."""
        piece = self.block // self.arrivals
        positions = [jnp.minimum(start + number * piece, last) for number in range(self.arrivals)]
        # All table entries are read before any is used, so that their latencies overlap.
        return [table[owner, lax.div(position, jnp.int32(self.page))] for position in positions]

    def rows(self, pages: list[jax.Array], first_row: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """The cache rows at which the pieces of the block of positions from ``start`` on begin.

        Pieces beyond ``last`` repeat its page, or are below zero where they are skipped: there is no page to name, and
        what they hold is masked or zeroed.
        """
        inside = lax.rem(start, jnp.int32(self.page)) if self.page > self.block else jnp.int32(0)
        rows = [pl.multiple_of(page * self.page + inside, ROW_STEP) for page in pages]
        if not self.skips:
            return rows
        piece = self.block // self.arrivals
        kept = [jnp.where(start + number * piece <= last, row, -ROW_STEP) for number, row in enumerate(rows)]
        return [pl.multiple_of(row, ROW_STEP) for row in kept]

    @property
    def skips(self) -> bool:
        """Whether a row may be below zero."""
        return self.loads.skip and self.arrivals > 1

    def load(self, source: jax.Ref, rows: list[jax.Array], columns: pl.Slice, slot: jax.Ref, full: jax.Ref) -> None:
        """Loads one block; each copy arrives at ``full``, also one that is skipped."""
        piece = self.block // self.arrivals
        if not self.loads.spread or len(rows) == 1:
            _copy_pieces(source, rows, columns, slot, full, piece, skips=self.skips)
            return

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            for number in range(WARPS):
                own = rows[number::WARPS]
                places = range(number, len(rows), WARPS)
                pl.when(warp == number)(
                    lambda own=own, places=places: _copy_pieces(
                        source, own, columns, slot, full, piece, places, skips=self.skips
                    )
                )


def load_blocks(
    source: Packed | Paged,
    table: jax.Ref | None,
    owner: jax.Array,
    first_row: jax.Array,
    first: jax.Array,
    end: jax.Array,
    last: jax.Array,
    done: jax.Array,
    stages: int,
    load: Callable[[jax.Array, jax.Array, jax.Array, list[jax.Array]], None],
) -> jax.Array:
    """``load(block, done, slot, rows)`` for the blocks from ``first`` to before ``end``; returns ``done`` after them.

    ``done`` counts the loads of all ``stages``, and ``slot`` is the next one's. The sequence ends at position ``last``.
    """
    B = source.block

    def one_block(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        done, *pages = carry
        slot, start = lax.rem(done, jnp.int32(stages)), block * B
        pages = pages or source.pages(table, owner, start, last)
        # Used by the next block only, so nothing waits for them here.
        following = source.pages(table, owner, start + B, last) if source.early else []
        load(block, done, slot, source.rows(pages, first_row, start, last))
        return done + 1, *following

    begun = source.pages(table, owner, first * B, last) if source.early else []
    return lax.fori_loop(first, end, one_block, (done, *begun))[0]


def _copy_pieces(
    source: jax.Ref,
    rows: list[jax.Array],
    columns: pl.Slice,
    slot: jax.Ref,
    full: jax.Ref,
    piece: int,
    places: Sequence[int] | None = None,
    *,
    skips: bool = False,
) -> None:
    """Copies pieces, one from each of ``rows``, to ``places`` of a block, by default to all of them in order."""
    for number, row in zip(places or range(len(rows)), rows, strict=True):
        into = slot if piece == slot.shape[0] else slot.at[pl.ds(number * piece, piece)]
        predicate = row >= 0 if skips else None
        plgpu.copy_gmem_to_smem(source.at[pl.ds(row, piece), columns], into, full, predicate=predicate)


def zero_rows(slot: jax.Ref, first: jax.Array, block: int, D: int) -> None:
    """Zeroes the rows of a loaded block from ``first`` on. Weight zero times NaN would be NaN."""
    width = next(size for size in (64, 32, 16) if D % size == 0)
    for row in range(0, block, 64):
        for column in range(0, D, width):
            part = slot.at[pl.ds(row, 64), pl.ds(column, width)]
            value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA) + row
            part[...] = jnp.where(rows < first, value, jnp.zeros((), jnp.bfloat16))
    plgpu.commit_smem()
