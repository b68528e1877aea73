"""The matmul region on sm90: which kernel runs for which shapes, and with which tile."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.matmul.hopper_cluster import ClusterTile, cluster_matmul
from pallas_kernels.matmul.hopper_large import LargeTile, large_matmul
from pallas_kernels.matmul.hopper_small import SmallTile, small_matmul
from pallas_kernels.program import Buffer, Program, Step

Tile = ClusterTile | LargeTile | SmallTile

#: Up to this many tokens they are wgmma's N operand. Neither form nor tile moves a bit, so this is free to tune.
SMALL_TOKENS = 128


def matmul_program(
    T: int,
    N: int,
    K: int,
    *,
    leaves: int = 1,
    bias: bool = False,
    out_dtype: str = "bfloat16",
    tile: Tile | None = None,
) -> Program:
    """``(x [T, K], w [N, K][, bias [N]]) -> out [T, N]`` for bfloat16 operands.

    ``tile`` overrides the committed choice, for gates and the tuner. Raises ValueError where T is no multiple of 8 or
    K does not divide into whole steps of every leaf.
    """
    tile = tile or choose_tile(T, N, K, leaves)
    kernel = matmul_kernel(T, N, K, leaves=leaves, bias=bias, out_dtype=out_dtype, tile=tile)
    operands = ("x", "w", "bias") if bias else ("x", "w")
    buffers = {"x": Buffer((T, K), "bfloat16"), "w": Buffer((N, K), "bfloat16"), "out": Buffer((T, N), out_dtype)}
    if bias:
        buffers["bias"] = Buffer((N,), "bfloat16")
    return Program(buffers, operands, ("out",), (Step("matmul", kernel, operands, ("out",)),))


def matmul_kernel(
    T: int,
    N: int,
    K: int,
    *,
    leaves: int,
    tile: Tile,
    bias: bool = False,
    out_dtype: str = "bfloat16",
    weight_parts: int = 1,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel of the tile's form. With fewer than N weight rows the missing ones count as zero.

    ``weight_parts``: operands that hold the weights, 2 where they are split as `hopper_weights` does.
    """
    common = {"leaves": leaves, "bias": bias, "out_dtype": out_dtype, "weight_parts": weight_parts}
    if isinstance(tile, ClusterTile):
        return cluster_matmul(T, N, K, tile=tile, **common)
    if isinstance(tile, LargeTile):
        return large_matmul(T, N, K, tile=tile, **common)
    return small_matmul(T, N, K, tile=tile, **common)


def choose_tile(T: int, N: int, K: int, leaves: int) -> Tile:
    """The tile for these shapes: a table would go here; this is the rule it would refine."""
    depth = next(depth for depth in (128, 64, 32, 16) if K % (leaves * depth) == 0 or depth == 16)
    if T <= SMALL_TOKENS:
        # At the fewest tokens too few blocks stream the weights: then two blocks share the leaves of a row.
        if leaves > 1 and T <= 32:
            return SmallTile(warpgroups=1 if N <= 4096 else 2, depth=depth, stages=4, parallel=2)
        return SmallTile(depth=depth, stages=6)
    if leaves == 1 and N % 256 == 0:
        return LargeTile(columns=256, stages=4, depth=min(depth, 64))
    # With eight leaves two levels of waiting sums share the block's memory with the pipeline.
    return LargeTile(columns=128 if leaves < 8 else 64, depth=min(depth, 64))
