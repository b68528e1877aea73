"""Times the sealed attention, prefill and decode: python benchmarks/attention.py OUT.json."""

import argparse
from typing import Any

import torch
from timing import microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.attention.hopper import attention_program, paged_attention_program
from pallas_kernels.seal import seal_program

H, K, D = 32, 8, 128


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def prefill(compiler: Compiler, count: int, length: int, split: int) -> dict[str, Any]:
    """Causal attention of ``count`` packed sequences; torch's own causal attention beside it."""
    T = count * length
    q, k, v = _bf16(T, H, D), _bf16(T, K, D), _bf16(T, K, D)
    positions = torch.arange(T, device="cuda", dtype=torch.int32) % length
    segments = torch.arange(T, device="cuda", dtype=torch.int32) // length
    layer = torch.zeros((), dtype=torch.int32, device="cuda")
    program = seal_program("attention", "1", {}, attention_program(T, H, K, D, scale=D**-0.5, split=split))
    run = Launcher(program, compiler)
    ours, spread = microseconds([lambda: run(q, k, v, positions, segments, layer)], repeats=5)
    batched = [t.view(count, length, -1, D).transpose(1, 2).contiguous() for t in (q, k, v)]

    def library() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)

    theirs, _ = microseconds([library], repeats=5)
    flops = 4 * count * length * length * H * D / 2
    return {
        "what": f"prefill {count} x {length}",
        "us": ours,
        "spread_us": spread,
        "torch_us": theirs,
        "tflops": flops / ours / 1e6,
    }


def decode(compiler: Compiler, count: int, length: int, split: int, page: int = 128) -> dict[str, Any]:
    """One query token for each of ``count`` requests over ``length`` cached positions."""
    T = max(8, count)
    per = -(-length // page)
    pages = count * per
    caches = [_bf16(pages, page, K, D) for _ in range(2)]
    table = torch.randperm(pages, device="cuda").int().view(count, per).contiguous()
    owner = torch.full((T,), -1, dtype=torch.int32, device="cuda")
    owner[:count] = torch.arange(count, device="cuda")
    positions = torch.full((T,), length - 1, dtype=torch.int32, device="cuda")
    sizes = {"pages": pages, "page": page, "requests": count, "request_pages": per}
    rows = []
    for lanes in (1, None):
        program = paged_attention_program(T, H, K, D, **sizes, scale=D**-0.5, split=split, single=True, lanes=lanes)
        run = Launcher(seal_program("paged_attention", "1", {}, program), compiler)
        q = _bf16(T, H, D)
        rows.append(microseconds([lambda run=run, q=q: run(q, *caches, table, owner, positions)], repeats=5)[0])
    moved = 2 * count * length * K * D * 2
    best = min(rows)
    return {"what": f"decode {count} x {length}", "us": best, "one_lane_us": rows[0], "tb_per_s": moved / best / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--split", type=int, default=512)
    arguments = parser.parse_args()
    compiler = Compiler(torch.device("cuda:0"))
    rows = []
    for measure, count, length in (
        (prefill, 1, 8192),
        (prefill, 16, 1024),
        (decode, 256, 2048),
        (decode, 8, 32768),
        (decode, 1, 32768),
    ):
        rows.append(measure(compiler, count, length, arguments.split))
        print(rows[-1], flush=True)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
