"""Which tile a matmul gets on sm90: measured where that was done, else by an estimate of its time."""

# Dimension letters: T tokens, N output columns, K reduction.

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.hopper_tools import sm_count
from pallas_kernels.matmul.hopper_cluster import ClusterTile
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import ROWS, SmallTile
from pallas_kernels.matmul.hopper_table import MEASURED

Tile = ClusterTile | LargeTile | SmallTile

#: Up to this many tokens they are wgmma's N operand. Neither form nor tile moves a bit, so this is free to tune.
SMALL_TOKENS = 64
#: Up to this many columns four blocks share the leaves of a row: their products are shorter than what they exchange.
NARROW = 1024
#: From so many tiles a block on, two warpgroups take a tile together.
MANY_ROUNDS = 4
#: More leaves than these in a block have a shallow ring: behind a deep one eight took 1.07 to 1.41 of cuBLAS's time at
#: 16 and 32 tokens, where the shallow one took 0.90 to 0.98; at 8 and 64 both took the same. Why is not known.
DEEP_LEAVES, DEEP, SHALLOW = 4, 10, 6
#: Columns of a warpgroup's tile whose sums fit registers and shared memory, by leaves.
WIDEST = {1: 256, 2: 128, 4: 128, 8: 128}
#: Both products of a gated tile, whose sums are combined beside each other in the registers.
WIDEST_GATED = 192
COLUMNS = (48, 64, 96, 128, 192, 256)
#: An H200 as the estimate sees it: operations and bytes a microsecond of one multiprocessor, bytes of the memory.
OPERATIONS, INTAKE, MEMORY = 5.6e6, 1.0e5, 4.0e6
#: How much faster a tile of 256 rows is than one of 128.
TALL = 1.06
#: Microseconds to start, to fold a leaf, and to exchange a cluster's sums at 128 columns.
START, FOLD, EXCHANGE = 2.0, 0.2, 4.3


def choose_tile(T: int, N: int, K: int, leaves: int, *, within: int = 0) -> Tile:
    """The tile for these shapes. within: columns that must be whole tiles, as where a bias is read along them."""
    depth = _depth(K, leaves)
    if T <= SMALL_TOKENS:
        return _small_tile(N, leaves, depth, within)
    measured = MEASURED.get((N, K, leaves), {}).get(T)
    if measured is not None and within % measured.block_columns == 0:
        return measured
    candidates = [tile for tile in _candidates(leaves, min(depth, 64)) if within % tile.block_columns == 0]
    return min(candidates, key=lambda tile: estimate(tile, T, N, K, leaves))


def _small_tile(N: int, leaves: int, depth: int, within: int) -> SmallTile:
    """For few tokens: what counts is that as many blocks as the card takes at once stream the weights.

    Blocks share the leaves of a row where both then stream, and take fewer rows where there are still too few. Where
    each has many tiles to stream, two warpgroups share what is loaded of the tokens. within: 0, or columns that must be
    whole tiles of all rows that wgmma takes.
    """
    # Tiles that a block takes in turn, of 64 rows and of two times 64.
    alone, pairs = (-(-N // (count * ROWS * sm_count())) for count in (1, 2))
    if pairs >= MANY_ROUNDS and 2 * pairs <= alone and within % (2 * ROWS) == 0:
        return SmallTile(warpgroups=2, depth=depth, stages=512 // depth)
    parallel = 1 if leaves == 1 or sm_count() < 2 * -(-N // ROWS) else min(leaves, 4 if N <= NARROW else 2)
    fitting = [rows for rows in (16, 32, 48) if parallel * -(-N // rows) <= sm_count()]
    rows = ROWS if within or parallel > 2 or not fitting else fitting[0]
    ring = DEEP if leaves <= DEEP_LEAVES else SHALLOW
    stages = (SHALLOW if rows == ROWS else 8) if parallel > 1 else ring
    return SmallTile(rows=rows, depth=depth, stages=stages, parallel=parallel)


def choose_gated_tile(T: int, I: int, K: int) -> LargeTile:  # noqa: E741
    """The tile for two matrices of I columns whose products meet in a warpgroup, half of its columns each."""
    # Both halves in every warpgroup, side by side along rows, and each written in pieces of at least 16 columns.
    candidates = [
        tile
        for tile in _candidates(1, min(_depth(K, 1), 64))
        if isinstance(tile, LargeTile) and tile.columns % 32 == 0 and tile.columns <= WIDEST_GATED
    ]
    return min(candidates, key=lambda tile: (estimate(tile, T, 2 * I, K, 1), -tile.columns))


def _depth(K: int, leaves: int) -> int:
    """Columns of one step: as many as divide a leaf."""
    return next(depth for depth in (128, 64, 32, 16) if K % (leaves * depth) == 0 or depth == 16)


def _candidates(leaves: int, depth: int) -> Iterator[LargeTile | ClusterTile]:
    for columns in COLUMNS:
        if columns <= WIDEST[leaves]:
            yield LargeTile(columns=columns, depth=depth)
    if leaves == 1:
        # As wide as the registers allow: for as many tokens, less is read for as much work.
        yield LargeTile(rows=128, columns=192, depth=depth)
    if leaves > 1:
        for columns in (64, 128):
            yield ClusterTile(columns=columns, depth=depth)


def estimate(tile: LargeTile | ClusterTile, T: int, N: int, K: int, leaves: int) -> float:
    """Microseconds on an H200, good enough to rank tiles: where it is not, the measured table has the shape.

    A block's tile takes as long as its operations, or as what it must read if that is slower; tiles take turns on the
    multiprocessors, so a last round that is not full costs as much as a full one.
    """
    rows, columns = tile.block_rows, tile.block_columns
    tiles = -(-T // rows) * -(-N // columns)
    # Wider tiles keep the tensor cores busier, and so do taller ones.
    speed = OPERATIONS * columns / (columns + 16) * (TALL if rows > 128 else 1)
    each = max(2 * rows * columns * K / speed, 2 * (rows + columns) * K / INTAKE) + FOLD * leaves
    blocks = sm_count()
    if isinstance(tile, ClusterTile):
        each = each / tile.parallel + EXCHANGE * columns / 128
        blocks //= tile.parallel
    read = 2 * (N * K + T * K + T * N) / MEMORY
    return START + max(-(-tiles // blocks) * each, read)
