"""Times a decode layer in a CUDA graph, chained, not, and its kernels alone: python benchmarks/layer.py OUT.json.

Chained launches overlap: the next kernel's blocks take their place while this one runs.
Layers' weights and caches rotate through more than the L2 cache.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from timing import microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels import hopper_tools
from pallas_kernels.attention.spec import DEFAULT_SPLIT
from pallas_kernels.hopper_regions import Type, region_program
from pallas_kernels.seal import SealedProgram, seal_program

#: Qwen3-8B: query and key heads, head size, hidden and feed-forward sizes.
H, K, D, HIDDEN, INNER = 32, 8, 128, 4096, 12288
PAGE, EPS = 16, 1e-6

#: A region, its operands' types, its parameters.
Call = tuple[str, list[Type], dict[str, Any]]


class Case(NamedTuple):
    """T requests of ``length`` tokens, of which they may have ``context``. chained: whether launches overlap."""

    T: int
    length: int
    context: int
    chained: bool


Tensors = dict[str, torch.Tensor]
Kernels = dict[str, Callable[[Tensors], Any]]


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16() * 0.02


def _sealed(case: Case) -> dict[str, SealedProgram]:
    """A layer's kernels."""
    T, length, context, chained = case
    b16, i32 = "bfloat16", "int32"
    hidden, cache = ((T, HIDDEN), b16), ((T * -(-length // PAGE), PAGE, K, D), b16)
    tokens, norm, wide = ((T,), i32), ((HIDDEN,), b16), (H + 2 * K) * D
    table = ((T, -(-context // PAGE)), i32)

    def matmul(columns: int, inner: int, leaves: int) -> Call:
        types = [((T, inner), b16), ((columns, inner), b16)]
        return "matmul", types, {"leaves": leaves, "out_dtype": b16}

    rope_types = [((T, wide), b16), ((T, D), "float32"), tokens, cache, cache, ((D,), b16), ((D,), b16)]
    attention_types = [((T, H, D), b16), cache, cache, table, tokens, tokens]
    calls: dict[str, Call] = {
        "add_norm": ("add_rms_norm", [hidden, hidden, norm], {"eps": EPS}),
        "qkv": matmul(wide, HIDDEN, 1),
        "rope": ("paged_qk_norm_rope", rope_types, {"key_heads": K, "eps": EPS}),
        "attention": ("paged_decode_attention", attention_types, {"scale": D**-0.5, "split": DEFAULT_SPLIT}),
        "out": matmul(HIDDEN, H * D, 4),
        "gate_up": ("gated_matmul", [hidden, ((2 * INNER, HIDDEN), b16)], {}),
        "down": matmul(HIDDEN, INNER, 4),
    }
    with nullcontext() if chained else mock.patch.object(hopper_tools, "follow"):
        return {
            what: seal_program(name, "1", parameters, region_program(name, tuple(types), parameters))
            for what, (name, types, parameters) in calls.items()
        }


def _kernels(run: dict[str, Launcher], T: int) -> Kernels:
    """A layer's kernels over tensors by name."""

    def attend(t: Tensors) -> torch.Tensor:
        (found,) = run["attention"](t["q"], t["keys"], t["values"], t["table"], t["owners"], t["positions"])
        return found.view(T, H * D)

    def rope(t: Tensors) -> tuple[torch.Tensor, ...]:
        return run["rope"](t["packed"], t["angles"], t["slots"], t["keys"], t["values"], t["q_norm"], t["k_norm"])

    return {
        "add_norm": lambda t: run["add_norm"](t["x"], t["residual"], t["norm"]),
        "qkv": lambda t: run["qkv"](t["normed"], t["qkv"])[0],
        "rope": rope,
        "attention": attend,
        "out": lambda t: run["out"](t["attended"], t["out"])[0],
        "gate_up": lambda t: run["gate_up"](t["normed"], t["gate_up"])[0],
        "down": lambda t: run["down"](t["inner"], t["down"])[0],
    }


def _layer(kernels: Kernels, t: Tensors) -> torch.Tensor:
    normed, residual = kernels["add_norm"](t)
    packed = kernels["qkv"](t | {"normed": normed})
    q, keys, values = kernels["rope"](t | {"packed": packed})
    attended = kernels["attention"](t | {"q": q, "keys": keys, "values": values})
    projected = kernels["out"](t | {"attended": attended})
    normed, _ = kernels["add_norm"](t | {"x": projected, "residual": residual})
    return kernels["down"](t | {"inner": kernels["gate_up"](t | {"normed": normed})})


def _tensors(T: int, length: int, context: int) -> Tensors:
    per = -(-length // PAGE)
    owners = torch.arange(T, device="cuda", dtype=torch.int32)
    table = torch.zeros(T, -(-context // PAGE), device="cuda", dtype=torch.int32)
    table[:, :per] = torch.randperm(T * per, device="cuda").int().view(T, per)
    last = length - 1
    found = {name: _bf16(T, HIDDEN) for name in ("x", "residual")}
    # What a kernel reads that is timed alone.
    found |= {"normed": _bf16(T, HIDDEN), "packed": _bf16(T, (H + 2 * K) * D), "q": _bf16(T, H, D)}
    found |= {"attended": _bf16(T, H * D), "inner": _bf16(T, INNER)}
    found |= {"norm": _bf16(HIDDEN), "q_norm": _bf16(D), "k_norm": _bf16(D)}
    found |= {"qkv": _bf16((H + 2 * K) * D, HIDDEN), "out": _bf16(HIDDEN, H * D)}
    found |= {"gate_up": _bf16(2 * INNER, HIDDEN), "down": _bf16(HIDDEN, INNER)}
    found |= {name: _bf16(T * per, PAGE, K, D) for name in ("keys", "values")}
    found |= {"angles": torch.rand(T, D, device="cuda"), "owners": owners, "table": table}
    found["positions"] = torch.full((T,), last, dtype=torch.int32, device="cuda")
    found["slots"] = table[:, last // PAGE].contiguous() * PAGE + last % PAGE
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--tokens", default="8,32,256")
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--context", type=int, default=0, help="most tokens of a request, where --length is less")
    parser.add_argument("--layers", type=int, default=6, help="with weights and caches of their own, in turn")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=9, help="of which a time is the median; many heat the card")
    arguments = parser.parse_args()
    context = max(arguments.context, arguments.length)
    torch.manual_seed(0)
    os.environ["JAX_PLATFORMS"] = "cpu"
    tokens = [int(text) for text in arguments.tokens.split(",")]
    cases = [Case(T, arguments.length, context, chained) for T in tokens for chained in (True, False)]
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        sealed = dict(zip(cases, pool.map(_sealed, cases), strict=True))
    compiler = Compiler(torch.device("cuda:0"))
    rows: list[dict[str, Any]] = []
    for T in tokens:
        layers = [_tensors(T, arguments.length, context) for _ in range(arguments.layers)]
        results = []
        for name, chained in (("chained", True), ("unchained", False)):
            programs = sealed[Case(T, arguments.length, context, chained)]
            kernels = _kernels({what: Launcher(program, compiler) for what, program in programs.items()}, T)
            results.append(_layer(kernels, layers[0]))
            timed = {name: partial(_layer, kernels)} | (kernels if chained else {})
            for what, run in timed.items():
                calls = [lambda t=t, run=run: run(t) for t in layers]
                us, spread = microseconds(calls, repeats=2 * len(calls), rounds=arguments.rounds)
                rows.append({"what": what, "T": T, "length": arguments.length, "context": context})
                rows[-1] |= {"layers": arguments.layers, "rounds": arguments.rounds}
                rows[-1] |= {"us": us, "spread_us": spread}
                print(rows[-1], flush=True)
        rows[-1]["same_bits"] = torch.equal(*(result.view(torch.int16) for result in results))
        print("same bits", rows[-1]["same_bits"], flush=True)
        write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
