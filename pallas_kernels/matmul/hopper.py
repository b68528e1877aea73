"""The matmul region on sm90: which kernel runs for which shapes, and with which tile."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.matmul.hopper_choice import Tile, choose_tile
from pallas_kernels.matmul.hopper_cluster import ClusterTile, cluster_matmul
from pallas_kernels.matmul.hopper_large import LargeTile, large_matmul
from pallas_kernels.matmul.hopper_small import small_matmul
from pallas_kernels.program import Buffer, Program, Step


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
    tile = tile or choose_tile(T, N, K, leaves, within=N if bias else 0)
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
