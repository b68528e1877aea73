"""Times the sealed matmul against cuBLAS (torch.matmul): python benchmarks/matmul.py OUT.json [--quick]."""

import argparse
import itertools
from typing import Any

import torch
from timing import copies, microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import SmallTile
from pallas_kernels.seal import seal_program

#: (N, K) of Qwen3-8B's linear layers.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]

SMALL = [
    SmallTile(warpgroups=w, depth=d, stages=s, parallel=p)
    for w, d, s, p in ((1, 128, 6, 1), (2, 128, 4, 1), (1, 128, 4, 2), (2, 128, 4, 2), (1, 128, 3, 4), (2, 64, 4, 4))
]
LARGE = [
    LargeTile(rows=64, columns=128, split="rows", stages=6),
    LargeTile(rows=64, columns=256, split="rows", stages=4),
    LargeTile(rows=64, columns=256, split="rows", stages=4, cluster=2),
    LargeTile(rows=64, columns=128, split="columns", stages=6),
    LargeTile(rows=64, columns=128, split="rows", depth=32, stages=12),
    LargeTile(rows=64, columns=64, split="rows", stages=8),
]


def _candidates(T: int, leaves: int) -> list[SmallTile | LargeTile]:
    if T <= 128:
        return [tile for tile in SMALL if leaves % tile.parallel == 0]
    return [tile for tile in LARGE if leaves == 1 or tile.rows * tile.columns <= 64 * 128]


def measure(compiler: Compiler, T: int, N: int, K: int, leaves: int) -> list[dict[str, Any]]:
    """All candidate tiles for one shape, after cuBLAS."""
    count = copies(2 * N * K)
    x = torch.randn(T, K, device="cuda").bfloat16()
    weights = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(count)]
    cublas, spread = microseconds([lambda w=w: torch.matmul(x, w.T) for w in weights])
    floor = max(2 * (N * K + T * K + T * N) / 4.3e6, 2 * T * N * K / 790e6)
    rows = []
    for tile in _candidates(T, leaves):
        row: dict[str, Any] = {"T": T, "N": N, "K": K, "leaves": leaves, "tile": repr(tile)}
        try:
            program = seal_program("matmul", "1", {}, matmul_program(T, N, K, leaves=leaves, tile=tile))
        except ValueError as error:
            print("skipped", row, str(error)[:200])
            continue
        run = Launcher(program, compiler)
        reference = torch.matmul(x, weights[0].T)
        error = ((run(x, weights[0])[0].float() - reference.float()).norm() / reference.float().norm()).item()
        ours, our_spread = microseconds([lambda w=w, run=run: run(x, w) for w in weights])
        row |= {"us": ours, "spread_us": our_spread, "cublas_us": cublas, "cublas_spread_us": spread}
        row |= {"ratio": ours / cublas, "floor_us": floor, "relative_error": error}
        print(f"{T:6} {N:6} {K:6} {leaves} {ours:8.1f} {cublas:8.1f} {row['ratio']:.3f} {error:.1e} {tile}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--tokens", default="8,64,128,256,1024,8192")
    parser.add_argument("--leaves", default="1,4")
    arguments = parser.parse_args()
    compiler = Compiler(torch.device("cuda:0"))
    rows = []
    tokens, leaves = ([int(v) for v in text.split(",")] for text in (arguments.tokens, arguments.leaves))
    for T, (N, K), count in itertools.product(tokens, SHAPES, leaves):
        rows += measure(compiler, T, N, K, count)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
