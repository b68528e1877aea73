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
class Paged:
    """A cache of pages, k, v [pages * page, K*D], found through ``block_table`` [requests, pages of a request].

    A block's pages are looked up while the block before it is loaded, and the loader's four warps issue its copies side
    by side.
    """

    block: int
    page: int

    def __post_init__(self) -> None:
        if self.page % ROW_STEP:
            raise ValueError(f"pages of {self.page} positions are not a multiple of {ROW_STEP}")
        if self.block % self.page and self.page % self.block:
            raise ValueError(f"pages of {self.page} positions neither divide blocks of {self.block} nor the reverse")

    @property
    def arrivals(self) -> int:
        """Copies that fill one block."""
        return max(1, self.block // self.page)

    def pages(self, table: jax.Ref, owner: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """The pages of the block of positions from ``start`` on. Where it has pages beyond ``last``, that one's."""
        piece = self.block // self.arrivals
        positions = [jnp.minimum(start + number * piece, last) for number in range(self.arrivals)]
        # All table entries are read before any is used, so that their latencies overlap.
        return [table[owner, lax.div(position, jnp.int32(self.page))] for position in positions]

    def rows(self, pages: list[jax.Array], first_row: jax.Array, start: jax.Array, last: jax.Array) -> list[jax.Array]:
        """The cache rows at which the pieces of the block of positions from ``start`` on begin.

        Pieces beyond ``last`` repeat its page: there is no page to name, and what they hold is masked or zeroed.
        """
        inside = lax.rem(start, jnp.int32(self.page)) if self.page > self.block else jnp.int32(0)
        return [pl.multiple_of(page * self.page + inside, ROW_STEP) for page in pages]

    def load(self, source: jax.Ref, rows: list[jax.Array], columns: pl.Slice, slot: jax.Ref, full: jax.Ref) -> None:
        """Loads one block; each copy arrives at ``full``."""
        piece = self.block // self.arrivals
        if len(rows) == 1:
            _copy_pieces(source, rows, columns, slot, full, piece)
            return

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            for number in range(WARPS):
                own = rows[number::WARPS]
                places = range(number, len(rows), WARPS)
                pl.when(warp == number)(
                    lambda own=own, places=places: _copy_pieces(source, own, columns, slot, full, piece, places)
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
        # Used by the next block only, so nothing waits for them here.
        following = source.pages(table, owner, start + B, last)
        load(block, done, slot, source.rows(pages, first_row, start, last))
        return done + 1, *following

    return lax.fori_loop(first, end, one_block, (done, *source.pages(table, owner, first * B, last)))[0]


def _copy_pieces(
    source: jax.Ref,
    rows: list[jax.Array],
    columns: pl.Slice,
    slot: jax.Ref,
    full: jax.Ref,
    piece: int,
    places: Sequence[int] | None = None,
) -> None:
    """Copies pieces, one from each of ``rows``, to ``places`` of a block, by default to all of them in order."""
    for number, row in zip(places or range(len(rows)), rows, strict=True):
        into = slot if piece == slot.shape[0] else slot.at[pl.ds(number * piece, piece)]
        plgpu.copy_gmem_to_smem(source.at[pl.ds(row, piece), columns], into, full)


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
