"""Times gate, up and SwiGLU in one kernel against matmul and SwiGLU: python benchmarks/gated.py OUT.json."""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import torch
from timing import copies, microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.matmul.hopper_gated import gated_matmul_program
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.seal import seal_program
from pallas_kernels.swiglu.hopper import swiglu_program

INNER, HIDDEN = 12288, 4096
TILES = [
    LargeTile(columns=96),
    LargeTile(columns=128),
    LargeTile(columns=192),
    LargeTile(columns=192, cluster=2),
    LargeTile(columns=256),
    LargeTile(columns=256, cluster=2),
    LargeTile(rows=128, columns=128),
    LargeTile(rows=128, columns=192),
    LargeTile(rows=128, columns=192, cluster=2, shared="tokens"),
    LargeTile(columns=192, cluster=2, shared="tokens"),
    LargeTile(columns=256, cluster=2, shared="tokens"),
]


def seal(case):
    T, kind, tile = case
    try:
        if kind == "gated":
            return seal_program("gated", "1", {}, gated_matmul_program(T, INNER, HIDDEN, tile=tile))
        if kind == "swiglu":
            return seal_program("swiglu", "1", {}, swiglu_program(T, INNER))
        return seal_program("matmul", "1", {}, matmul_program(T, 2 * INNER, HIDDEN, leaves=1, tile=tile))
    except Exception as error:
        print("skipped", case, repr(error)[:200], flush=True)
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--tokens", default="128,256,512,1024,2048")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    cases = []
    for T in map(int, arguments.tokens.split(",")):
        cases.append((T, "swiglu", None))
        for kind in ("matmul", "gated"):
            cases += [(T, kind, tile) for tile in (([None] if kind == "matmul" else []) + TILES)]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        sealed = {case: program for case, program in zip(cases, pool.map(seal, cases), strict=True) if program}
    compiler = Compiler(torch.device("cuda:0"))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        runs = dict(zip(sealed, threads.map(lambda program: Launcher(program, compiler), sealed.values()), strict=True))
    print(f"{len(runs)} kernels", flush=True)
    count = copies(4 * INNER * HIDDEN)
    weights = [torch.randn(2 * INNER, HIDDEN, device="cuda").bfloat16() * 0.02 for _ in range(count)]
    rows, x, first = [], None, {}
    for (T, kind, tile), run in runs.items():
        if kind == "swiglu":
            x, first = torch.randn(T, HIDDEN, device="cuda").bfloat16(), {}
            cublas, _ = microseconds([lambda w=w: torch.matmul(x, w.T) for w in weights])
            swiglu, activate = run, run
            wide = torch.randn(T, 2 * INNER, device="cuda").bfloat16()
            us, spread = microseconds([lambda: swiglu(wide)])
            print(T, "cublas", round(cublas, 1), "swiglu", round(us, 1), flush=True)
            continue
        found = run(x, weights[0])[0]
        if kind == "matmul":
            found = activate(found)[0]
        reference = first.setdefault(T, found)
        same = torch.equal(found.view(torch.int16), reference.view(torch.int16))
        us, spread = microseconds([lambda w=w: run(x, w) for w in weights])
        rows.append({"T": T, "kind": kind, "tile": repr(tile), "us": us, "spread_us": spread, "same_bits": same, "cublas_us": cublas})
        print(T, kind, round(us, 1), round(spread, 1), same, repr(tile)[10:], flush=True)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
