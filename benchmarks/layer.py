"""Times a decode layer in a CUDA graph, chained, not, and its kernels alone: python benchmarks/layer.py OUT.json.

Chained launches overlap: the next kernel's blocks take their place while this one runs.
Layers' weights and caches rotate through more than the L2 cache.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from timing import microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels import hopper_tools
from pallas_kernels.hopper_regions import Type, region_program
from pallas_kernels.seal import seal_program

#: Qwen3-8B: query and key heads, head size, hidden and feed-forward sizes.
H, K, D, HIDDEN, INNER = 32, 8, 128, 4096, 12288
PAGE, EPS = 16, 1e-6


@contextmanager
def _unchained() -> Iterator[None]:
    with mock.patch.object(hopper_tools, "follow"):
        yield


def _kernel(compiler: Compiler, name: str, types: list[Type], parameters: dict[str, Any]) -> Launcher:
    return Launcher(seal_program(name, "1", parameters, region_program(name, tuple(types), parameters)), compiler)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16() * 0.02


Tensors = dict[str, torch.Tensor]


def _kernels(compiler: Compiler, T: int, length: int, context: int) -> dict[str, Callable[[Tensors], Any]]:
    """A layer's kernels over tensors by name, for T requests of ``length`` tokens, each with its last token.

    context: the most tokens that a request may have, which the kernels are made for.
    """
    b16, i32 = "bfloat16", "int32"
    per = -(-length // PAGE)
    hidden, cache = ((T, HIDDEN), b16), ((T * per, PAGE, K, D), b16)
    tokens, norm, wide = ((T,), i32), ((HIDDEN,), b16), (H + 2 * K) * D

    def matmul(columns: int, inner: int, leaves: int) -> Launcher:
        types = [((T, inner), b16), ((columns, inner), b16)]
        return _kernel(compiler, "matmul", types, {"leaves": leaves, "out_dtype": b16})

    add_norm = _kernel(compiler, "add_rms_norm", [hidden, hidden, norm], {"eps": EPS})
    qkv, out = matmul(wide, HIDDEN, 1), matmul(HIDDEN, H * D, 4)
    down = matmul(HIDDEN, INNER, 4)
    gate_up = _kernel(compiler, "gated_matmul", [hidden, ((2 * INNER, HIDDEN), b16)], {})
    rope_types = [((T, wide), b16), ((T, D), "float32"), tokens, cache, cache, ((D,), b16), ((D,), b16)]
    rope = _kernel(compiler, "paged_qk_norm_rope", rope_types, {"key_heads": K, "eps": EPS})
    attention_types = [((T, H, D), b16), cache, cache, ((T, -(-context // PAGE)), i32), tokens, tokens]
    attention = _kernel(compiler, "paged_attention", attention_types, {"scale": D**-0.5, "split": 512})

    return {
        "add_norm": lambda t: add_norm(t["x"], t["residual"], t["norm"]),
        "qkv": lambda t: qkv(t["normed"], t["qkv"])[0],
        "rope": lambda t: rope(t["packed"], t["angles"], t["slots"], t["keys"], t["values"], t["q_norm"], t["k_norm"]),
        "attention": lambda t: attention(t["q"], t["keys"], t["values"], t["table"], t["owners"], t["positions"])[
            0
        ].view(T, H * D),
        "out": lambda t: out(t["attended"], t["out"])[0],
        "gate_up": lambda t: gate_up(t["normed"], t["gate_up"])[0],
        "down": lambda t: down(t["inner"], t["down"])[0],
    }


def _layer(kernels: dict[str, Callable[[Tensors], Any]], t: Tensors) -> torch.Tensor:
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
    parser.add_argument("--rounds", type=int, default=9, help="of which a time is the median; many heat the card")
    arguments = parser.parse_args()
    context = max(arguments.context, arguments.length)
    torch.manual_seed(0)
    compiler = Compiler(torch.device("cuda:0"))
    rows: list[dict[str, Any]] = []
    for T in map(int, arguments.tokens.split(",")):
        layers = [_tensors(T, arguments.length, context) for _ in range(arguments.layers)]
        results = []
        for name, launches in (("chained", nullcontext()), ("unchained", _unchained())):
            with launches:
                kernels = _kernels(compiler, T, arguments.length, context)
            results.append(_layer(kernels, layers[0]))
            timed = {name: partial(_layer, kernels)} | (kernels if name == "chained" else {})
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
