"""Times the sealed attention beside vLLM's FlashAttention 3, prefill and decode: python benchmarks/attention.py OUT."""

from __future__ import annotations

import argparse
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from timing import in_turns, write_results

from pallas_kernels.attention.hopper import attention_program, paged_attention_program
from pallas_kernels.attention.spec import DEFAULT_SPLIT
from pallas_kernels.program import Program
from pallas_kernels.seal import seal_program

if TYPE_CHECKING:
    from bridge.launcher import Compiler

H, K, D = 32, 8, 128
DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Cache:
    """How an engine keeps what it has computed.

    page: positions a page. interleaved: a page of values behind each page of keys in one tensor, as vLLM holds them for
    us, else a tensor of each. requests, context: rows of the page table and positions of a row, at least.
    """

    page: int = 128
    interleaved: bool = False
    requests: int = 0
    context: int = 0

    def sizes(self, count: int, length: int) -> dict[str, int]:
        """Of the sealed program, for ``count`` requests with ``length`` cached positions."""
        per, each = -(-length // self.page), 2 if self.interleaved else 1
        return {
            "pages": each * count * per,
            "page": self.page,
            "requests": max(count, self.requests),
            "request_pages": max(per, -(-self.context // self.page)),
        }

    def program(self, T: int, count: int, length: int, split: int, *, decode: bool = False) -> Program:
        """Attention of a step of ``T`` tokens over this cache. decode: whether every request has one."""
        options = {"scale": D**-0.5, "split": split, "single_tokens_only": decode}
        return paged_attention_program(T, H, K, D, **self.sizes(count, length), **options)

    def tensors(self, count: int, length: int) -> Tensors:
        """Random keys and values on shuffled pages."""
        per, sizes = -(-length // self.page), self.sizes(count, length)
        table = torch.zeros(sizes["requests"], sizes["request_pages"], dtype=torch.int32, device=DEVICE)
        table[:count, :per] = torch.randperm(count * per, device=DEVICE).int().view(count, per)
        shape = self.page, K, D
        if not self.interleaved:
            caches = [_bf16(count * per, *shape) for _ in range(2)]
            return Tensors(caches, table, caches, table)
        blocks = _bf16(count * per, 2, *shape)
        pages = blocks.view(-1, *shape)
        # As the engine does: seen from one page on, a block's values have its keys' number.
        return Tensors([pages[:-1], pages[1:]], 2 * table, [blocks[:, 0], blocks[:, 1]], table)

    def named(self) -> dict[str, Any]:
        """For a row of results."""
        return {"page": self.page, "layout": "interleaved" if self.interleaved else "apart"}


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Keys and values, and the page table: as our kernels take them, and as FlashAttention does. The same memory."""

    caches: list[torch.Tensor]
    table: torch.Tensor
    library_caches: list[torch.Tensor]
    library_table: torch.Tensor


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def prefill(compiler: Compiler, count: int, length: int, split: int) -> dict[str, Any]:
    """Causal attention of ``count`` packed sequences of ``length`` tokens."""
    T = count * length
    q, k, v = _bf16(T, H, D), _bf16(T, K, D), _bf16(T, K, D)
    positions = torch.arange(T, device=DEVICE, dtype=torch.int32) % length
    segments = torch.arange(T, device=DEVICE, dtype=torch.int32) // length
    layer = torch.zeros((), dtype=torch.int32, device=DEVICE)

    run = _launcher(compiler, "attention", attention_program(T, H, K, D, scale=D**-0.5, split=split))
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32) * length
    found = _against_library(
        lambda: run(q, k, v, positions, segments, layer)[0],
        lambda: flash_attention(q, k, v, starts, length, length, cu_seqlens_k=starts),
    )
    flops = 4 * count * length * length * H * D / 2
    return {"what": f"prefill {count} x {length}", **found, "tflops": flops / found["us"] / 1e6}


def decode(compiler: Compiler, count: int, length: int, split: int, cache: Cache) -> dict[str, Any]:
    """One query token for each of ``count`` requests over ``length`` cached positions, launched as the engine does."""
    T = _bucket(count)
    owner = torch.full((T,), -1, dtype=torch.int32, device=DEVICE)
    owner[:count] = torch.arange(count, device=DEVICE)
    positions = torch.full((T,), length - 1, dtype=torch.int32, device=DEVICE)
    q, held = _bf16(T, H, D), cache.tensors(count, length)
    program = cache.program(T, count, length, split, decode=True)
    run = _launcher(compiler, "paged_decode_attention", program)
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32)
    used = torch.full((count,), length, dtype=torch.int32, device=DEVICE)
    keys = {"seqused_k": used, "block_table": held.library_table[:count]}
    found = _against_library(
        lambda: run(q, *held.caches, held.table, owner, positions)[0][:count],
        lambda: flash_attention(q[:count], *held.library_caches, starts, 1, length, **keys),
    )
    moved = 2 * count * length * K * D * 2
    return {"what": f"decode {count} x {length}", **cache.named(), **found, "tb_per_s": moved / found["us"] / 1e6}


def prefill_step(compiler: Compiler, count: int, length: int, split: int, cache: Cache, behind: int) -> dict[str, Any]:
    """A step of the engine with ``length`` tokens of each of ``count`` prompts, ``behind`` more of which are cached."""
    T, history = count * length, behind + length
    positions = behind + torch.arange(T, device=DEVICE, dtype=torch.int32) % length
    owner = torch.arange(T, device=DEVICE, dtype=torch.int32) // length
    q, held = _bf16(T, H, D), cache.tensors(count, history)

    run = _launcher(compiler, "paged_attention", cache.program(T, count, history, split))
    starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32) * length
    used = torch.full((count,), history, dtype=torch.int32, device=DEVICE)
    keys = {"seqused_k": used, "block_table": held.library_table[:count]}
    found = _against_library(
        lambda: run(q, *held.caches, held.table, owner, positions)[0],
        lambda: flash_attention(q, *held.library_caches, starts, length, history, **keys),
    )
    flops = 4 * T * (behind + length / 2) * H * D
    what = {"what": f"prefill step {count} x {length}", "behind": behind, **cache.named()}
    return {**what, **found, "tflops": flops / found["us"] / 1e6}


def _bucket(count: int) -> int:
    """Tokens of the step that ``count`` requests decode in."""
    return max(8, count)


def _launcher(compiler: Compiler, region: str, program: Program) -> Callable[..., tuple[torch.Tensor, ...]]:
    from bridge.launcher import Launcher

    return Launcher(seal_program(region, "1", {}, program), compiler)


def _against_library(ours: Callable[[], torch.Tensor], library: Callable[[], torch.Tensor]) -> dict[str, Any]:
    difference = float((ours().float() - library().float()).abs().max())
    (us, spread), (library_us, library_spread) = in_turns([[ours], [library]], repeats=5)
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
    """Parses the command line; a row that fails is printed, and the others still run."""
    arguments = parser().parse_args()
    torch.manual_seed(0)
    from bridge.launcher import Compiler

    compiler = Compiler(torch.device("cuda:0"))
    found: list[dict[str, Any]] = []
    for number, cache in enumerate(caches(arguments)):
        for name, measure, options, count, length in rows(cache, arguments.decode_lengths):
            # What keeps no pages is measured once.
            if arguments.rows not in f"{name} {count} x {length}" or (number and measure is prefill):
                continue
            try:
                found.append(measure(compiler, count, length, arguments.split, *options))
            except Exception:
                print(f"{name} {count} x {length}, {cache}: failed", flush=True)
                traceback.print_exc()
                continue
            print(found[-1], flush=True)
            write_results(arguments.out, found)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--split", type=int, default=DEFAULT_SPLIT)
    parser.add_argument("--page", type=int, nargs="+", default=[128], help="positions of a page, 16 in the engine")
    parser.add_argument("--layout", nargs="+", choices=("apart", "interleaved"), default=["apart"])
    parser.add_argument("--requests", type=int, default=0, help="requests that a step may have, where it has fewer")
    parser.add_argument("--context", type=int, default=0, help="positions that a request may have, where it has fewer")
    parser.add_argument("--rows", default="", help="only rows whose name contains this, as 'decode 256'")
    parser.add_argument("--decode-lengths", type=int, nargs="*", default=[], help="more contexts of 256 requests")
    return parser


def caches(arguments: argparse.Namespace) -> list[Cache]:
    """Every layout with every page size."""
    return [
        Cache(page, layout == "interleaved", arguments.requests, arguments.context)
        for page in arguments.page
        for layout in arguments.layout
    ]


def rows(cache: Cache, decode_lengths: Sequence[int]) -> list[tuple[Any, ...]]:
    """What is measured: name, function, its last arguments, sequences and tokens of each."""
    return [
        ("prefill", prefill, (), 1, 8192),
        ("prefill", prefill, (), 16, 1024),
        ("prefill", prefill, (), 2, 1024),
        ("prefill step", prefill_step, (cache, 0), 2, 1024),
        ("prefill step", prefill_step, (cache, 0), 1, 2048),
        ("prefill step", prefill_step, (cache, 6144), 1, 2048),
        ("prefill step", prefill_step, (cache, 0), 1, 8192),
        ("decode", decode, (cache,), 256, 2048),
        ("decode", decode, (cache,), 256, 384),
        ("decode", decode, (cache,), 32, 384),
        ("decode", decode, (cache,), 8, 384),
        ("decode", decode, (cache,), 8, 32768),
        ("decode", decode, (cache,), 1, 32768),
        ("decode", decode, (cache,), 1, 640),
        *(("decode", decode, (cache,), 256, length) for length in decode_lengths),
    ]


if __name__ == "__main__":
    main()
