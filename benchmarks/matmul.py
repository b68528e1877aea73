"""Times the sealed matmul against cuBLAS (torch.matmul): python benchmarks/matmul.py OUT.json [--tokens 64,1024]."""

import argparse
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from timing import copies, in_turns, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.matmul.hopper_choice import WIDEST, Tile, choose_tile
from pallas_kernels.matmul.hopper_cluster import ClusterTile
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import SmallTile
from pallas_kernels.seal import SealedProgram, seal_program

#: (N, K) of Qwen3-8B's linear layers; with one leaf, of its head as well.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
HEAD = (151936, 4096)

SMALL = [
    SmallTile(warpgroups=w, rows=r, depth=128, stages=s, parallel=p, columns=c)
    for c in (32, 8)
    for w, r, s, p in (
        *((1, 64, 6, 1), (1, 64, 10, 1), (1, 48, 10, 1), (1, 32, 10, 1), (2, 64, 4, 1)),
        *((1, 64, 4, 2), (1, 64, 6, 2), (1, 32, 8, 2), (2, 64, 4, 2)),
    )
]
LARGE = [
    *(LargeTile(columns=columns) for columns in (48, 64, 96, 128, 192, 256)),
    *(LargeTile(columns=columns, cluster=2) for columns in (96, 128, 192, 256)),
    *(LargeTile(rows=128, columns=columns) for columns in (48, 64, 96, 128, 192)),
    LargeTile(columns=128, run=2),
    LargeTile(columns=64, depth=128, stages=5),
]
CLUSTER = [
    ClusterTile(parallel=2),
    ClusterTile(parallel=2, columns=64),
    ClusterTile(parallel=4, columns=64),
    ClusterTile(parallel=4, columns=128),
]


class Case(NamedTuple):
    """One shape and tile; leaves: of the reduction."""

    T: int
    N: int
    K: int
    leaves: int
    tile: Tile


def _cases(T: int, N: int, K: int, leaves: int) -> list[Case]:
    small = [tile for tile in SMALL if T <= 128 and leaves % tile.parallel == 0]
    # For more tokens a product is as wide as they are.
    small = [tile for tile in small if tile.columns == 32 or T < 32]
    # Narrow tiles are for not many tokens, and those that share weights for more than one row of tiles.
    large = [tile for tile in LARGE if T > 64 and tile.columns <= WIDEST[leaves]]
    # Tall ones leave no registers for a second leaf's sum.
    large = [tile for tile in large if tile.rows == 64 or (leaves == 1 and T > 128)]
    large = [tile for tile in large if (tile.columns >= 128 or T <= 512) and (tile.cluster == 1 or T > 128)]
    large = [tile for tile in large if tile.run == 4 or leaves > 2]
    cluster = [tile for tile in CLUSTER if 64 < T <= 512 and leaves in (tile.parallel, 2 * tile.parallel)]
    return [Case(T, N, K, leaves, tile) for tile in (*small, *large, *cluster)]


def _seal(case: Case) -> SealedProgram | None:
    try:
        T, N, K, leaves, tile = case
        return seal_program("matmul", "1", {}, matmul_program(T, N, K, leaves=leaves, tile=tile))
    except ValueError as error:
        print("skipped", case, str(error)[:200], flush=True)
        return None


def measure(cases: list[Case], runs: dict[Case, Launcher]) -> list[dict[str, Any]]:
    """All tiles of one shape in turns with cuBLAS."""
    T, N, K, leaves, _ = cases[0]
    cases = [case for case in cases if case in runs]
    x = torch.randn(T, K, device="cuda").bfloat16()
    weights = [torch.randn(N, K, device="cuda").bfloat16() for _ in range(copies(2 * N * K))]
    timed = in_turns(
        [
            [lambda w=w: torch.matmul(x, w.T) for w in weights],
            *([lambda w=w, run=runs[case]: run(x, w) for w in weights] for case in cases),
        ]
    )
    cublas, spread = timed[0]
    reference = torch.matmul(x, weights[0].T).float()
    floor = max(2 * (N * K + T * K + T * N) / 4.3e6, 2 * T * N * K / 790e6)
    rows = []
    first = None
    for case, (ours, our_spread) in zip(cases, timed[1:], strict=True):
        found = runs[case](x, weights[0])[0]
        error = ((found.float() - reference).norm() / reference.norm()).item()
        first = found if first is None else first
        same = torch.equal(found.view(torch.int16), first.view(torch.int16))
        row: dict[str, Any] = {"T": T, "N": N, "K": K, "leaves": leaves, "tile": repr(case.tile)}
        row |= {"us": ours, "spread_us": our_spread, "cublas_us": cublas, "cublas_spread_us": spread}
        row |= {"chosen": case.tile == choose_tile(T, N, K, leaves)}
        row |= {"ratio": ours / cublas, "floor_us": floor, "relative_error": error, "bits_as_the_first_tile": same}
        print(
            f"{T:6} {N:6} {K:6} {leaves} {ours:8.1f} {cublas:8.1f} {row['ratio']:.3f} {error:.1e} {same} {case.tile}",
            flush=True,
        )
        rows.append(row)
    return rows


def _wanted(tile: Tile, text: str | None) -> bool:
    return text is not None and text in repr(tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--tokens", default="8,64,128,256,1024,8192")
    parser.add_argument("--leaves", default="1,4")
    parser.add_argument("--chosen", action="store_true", help="time the committed choice alone, not all tiles")
    parser.add_argument("--tile", help="beside the committed choice, only tiles whose text has this in it")
    parser.add_argument("--shape", action="append", help="COLUMNSxINNER, instead of those of Qwen3-8B and its head")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    tokens, leaves = ([int(v) for v in text.split(",")] for text in (arguments.tokens, arguments.leaves))
    given = [tuple(int(v) for v in text.split("x")) for text in arguments.shape or ()]
    shapes = [
        (T, N, K, count)
        for T, count in itertools.product(tokens, leaves)
        # A result's elements are numbered with 32 bits.
        for N, K in given or (*SHAPES, *([HEAD] if count == 1 and T * HEAD[0] < 2**31 else []))
    ]
    groups = [_cases(*shape) for shape in shapes]
    if arguments.chosen or arguments.tile:
        groups = [
            [chosen, *(case for case in cases if case != chosen and _wanted(case.tile, arguments.tile))]
            for chosen, cases in zip((Case(*shape, choose_tile(*shape)) for shape in shapes), groups, strict=True)
        ]
    cases = [case for group in groups for case in group]
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        sealed = {case: program for case, program in zip(cases, pool.map(_seal, cases), strict=True) if program}
    compiler = Compiler(torch.device("cuda:0"))
    with ThreadPoolExecutor(arguments.processes) as threads:
        runs = dict(zip(sealed, threads.map(lambda program: Launcher(program, compiler), sealed.values()), strict=True))
    print(f"{len(runs)} kernels", flush=True)
    rows = []
    for group in groups:
        rows += measure(group, runs)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
