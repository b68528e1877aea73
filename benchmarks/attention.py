"""Times the sealed attention beside vLLM's FlashAttention 3, prefill and decode: python benchmarks/attention.py OUT."""

import argparse
from collections.abc import Callable
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
    """Causal attention of ``count`` packed sequences of ``length`` tokens."""
    T = count * length
    q, k, v = _bf16(T, H, D), _bf16(T, K, D), _bf16(T, K, D)
    positions = torch.arange(T, device="cuda", dtype=torch.int32) % length
    segments = torch.arange(T, device="cuda", dtype=torch.int32) // length
    layer = torch.zeros((), dtype=torch.int32, device="cuda")
    program = seal_program("attention", "1", {}, attention_program(T, H, K, D, scale=D**-0.5, split=split))
    run = Launcher(program, compiler)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    found = _against_library(
        lambda: run(q, k, v, positions, segments, layer)[0],
        lambda: flash_attention(q, k, v, starts, length, length, cu_seqlens_k=starts),
    )
    flops = 4 * count * length * length * H * D / 2
    return {"what": f"prefill {count} x {length}", **found, "tflops": flops / found["us"] / 1e6}


def decode(
    compiler: Compiler, count: int, length: int, split: int, page: int, requests: int, context: int
) -> dict[str, Any]:
    """One query token for each of ``count`` requests over ``length`` cached positions, launched as the engine does."""
    T = max(8, count)
    owner = torch.full((T,), -1, dtype=torch.int32, device="cuda")
    owner[:count] = torch.arange(count, device="cuda")
    positions = torch.full((T,), length - 1, dtype=torch.int32, device="cuda")
    run, q, caches, table = _paged(compiler, T, count, length, split, page, requests, context)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    used = torch.full((count,), length, dtype=torch.int32, device="cuda")
    found = _against_library(
        lambda: run(q, *caches, table, owner, positions)[0][:count],
        lambda: flash_attention(q[:count], *caches, starts, 1, length, seqused_k=used, block_table=table[:count]),
    )
    moved = 2 * count * length * K * D * 2
    return {"what": f"decode {count} x {length}", "page": page, **found, "tb_per_s": moved / found["us"] / 1e6}


def prefill_step(
    compiler: Compiler, count: int, length: int, split: int, page: int, requests: int, context: int, behind: int
) -> dict[str, Any]:
    """A step of the engine with ``length`` tokens of each of ``count`` prompts, ``behind`` more of which are cached."""
    T, history = count * length, behind + length
    positions = behind + torch.arange(T, device="cuda", dtype=torch.int32) % length
    owner = torch.arange(T, device="cuda", dtype=torch.int32) // length
    run, q, caches, table = _paged(compiler, T, count, history, split, page, requests, context)
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length
    used = torch.full((count,), history, dtype=torch.int32, device="cuda")
    found = _against_library(
        lambda: run(q, *caches, table, owner, positions)[0],
        lambda: flash_attention(q, *caches, starts, length, history, seqused_k=used, block_table=table[:count]),
    )
    flops = 4 * T * (behind + length / 2) * H * D
    what = {"what": f"prefill step {count} x {length}", "behind": behind, "page": page}
    return {**what, **found, "tflops": flops / found["us"] / 1e6}


def _paged(
    compiler: Compiler, T: int, count: int, length: int, split: int, page: int, requests: int, context: int
) -> tuple[Launcher, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The launcher, queries, caches and shuffled table of ``count`` requests with ``length`` cached positions.

    The table has at least ``requests`` rows, as an engine's has a row for each request that it may run, each with room
    for at least ``context`` positions.
    """
    per = -(-length // page)
    pages, rows = count * per, max(count, requests)
    caches = [_bf16(pages, page, K, D) for _ in range(2)]
    table = torch.zeros(rows, max(per, -(-context // page)), dtype=torch.int32, device="cuda")
    table[:count, :per] = torch.randperm(pages, device="cuda").int().view(count, per)
    sizes = {"pages": pages, "page": page, "requests": rows, "request_pages": table.shape[1]}
    program = paged_attention_program(T, H, K, D, **sizes, scale=D**-0.5, split=split)
    return Launcher(seal_program("paged_attention", "1", {}, program), compiler), _bf16(T, H, D), caches, table


def _against_library(ours: Callable[[], torch.Tensor], library: Callable[[], torch.Tensor]) -> dict[str, Any]:
    difference = float((ours().float() - library().float()).abs().max())
    us, spread = microseconds([ours], repeats=5)
    library_us, library_spread = microseconds([library], repeats=5)
    return {
        "us": us,
        "spread_us": spread,
        "flash_attention_3_us": library_us,
        "flash_attention_3_spread_us": library_spread,
        "ratio": us / library_us,
        "largest_difference": difference,
    }


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, history: int, **keys: Any
) -> torch.Tensor:
    """vLLM's own attention on this card, causal."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    sizes = {"max_seqlen_q": longest, "cu_seqlens_q": starts, "max_seqlen_k": history}
    return flash_attn_varlen_func(q, k, v, **sizes, **keys, softmax_scale=D**-0.5, causal=True, fa_version=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--split", type=int, default=512)
    parser.add_argument("--page", type=int, default=128, help="positions of a page, 16 in the engine")
    parser.add_argument("--requests", type=int, default=0, help="requests that a step may have, where it has fewer")
    parser.add_argument("--context", type=int, default=0, help="positions that a request may have, where it has fewer")
    parser.add_argument("--rows", default="", help="only rows whose name contains this, as 'decode 256'")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    compiler = Compiler(torch.device("cuda:0"))
    paged = (arguments.page, arguments.requests, arguments.context)
    rows = []
    for name, measure, options, count, length in (
        ("prefill", prefill, (), 1, 8192),
        ("prefill", prefill, (), 16, 1024),
        ("prefill", prefill, (), 2, 1024),
        ("prefill step", prefill_step, (*paged, 0), 2, 1024),
        ("prefill step", prefill_step, (*paged, 0), 1, 2048),
        ("prefill step", prefill_step, (*paged, 6144), 1, 2048),
        ("decode", decode, paged, 256, 2048),
        ("decode", decode, paged, 256, 384),
        ("decode", decode, paged, 32, 384),
        ("decode", decode, paged, 8, 384),
        ("decode", decode, paged, 8, 32768),
        ("decode", decode, paged, 1, 32768),
        ("decode", decode, paged, 1, 640),
    ):
        if arguments.rows not in f"{name} {count} x {length}":
            continue
        rows.append(measure(compiler, count, length, arguments.split, *options))
        print(rows[-1], flush=True)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
