"""Decode attention on a card that computes without pause, its time and energy: python benchmarks/energy.py OUT.json.

256 requests of Qwen3-8B's and Qwen3-1.7B's heads. Three ways: as it is; with what shared memory held in the rows of a
product that are no query head; and vLLM's FlashAttention 3. An output projection by cuBLAS follows each call, as in a
model, so that shared memory holds something, and is in every figure. Energy is the card's own counter.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from attention import Cache, D, flash_attention
from timing import captured, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.attention import hopper_softmax
from pallas_kernels.attention.hopper import paged_attention_program
from pallas_kernels.attention.spec import DEFAULT_SPLIT
from pallas_kernels.seal import SealedProgram, seal_program

REQUESTS = 256
#: Query and key heads, and columns of the projection.
MODELS = {"qwen3_8b": (32, 8, 4096), "qwen3_1b7": (16, 8, 2048)}
CACHE = Cache(page=16, requests=REQUESTS, context=8704)
#: Layers whose caches and weights take turns; together they are larger than the L2 cache.
LAYERS = 4
#: Seconds before and in a measurement.
WARM, WINDOW = 0.3, 1.0


class Energy:
    """The card's counter, through NVIDIA's management library."""

    def __init__(self, card: int = 0) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", card, ctypes.byref(self._device))

    def joules(self) -> float:
        """Since the driver was loaded."""
        found = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(found))
        return found.value / 1000

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")


def sealed(H: int, K: int, length: int, *, zeros: bool) -> SealedProgram:
    """Decode attention; without ``zeros`` idle rows hold what they find."""
    sizes = CACHE.sizes(REQUESTS, length)
    options = {"scale": D**-0.5, "split": DEFAULT_SPLIT, "single_tokens_only": True}
    as_found = {
        "start_state": lambda size, _: hopper_softmax.empty_state(size),
        "without_idle": lambda queries, _: queries,
    }
    with nullcontext() if zeros else mock.patch.multiple(hopper_softmax, **as_found):
        return seal_program("attention", "1", {}, paged_attention_program(REQUESTS, H, K, D, **sizes, **options))


def arms(compiler: Compiler, model: str, length: int) -> dict[str, list[Callable[[], Any]]]:
    """A layer's calls after the other's, by way. Raises ValueError where zeros move a bit."""
    H, K, columns = MODELS[model]
    owners = torch.arange(REQUESTS, device="cuda", dtype=torch.int32)
    positions = torch.full((REQUESTS,), length - 1, dtype=torch.int32, device="cuda")
    starts = torch.arange(REQUESTS + 1, device="cuda", dtype=torch.int32)
    used = torch.full((REQUESTS,), length, dtype=torch.int32, device="cuda")
    held = [CACHE.tensors(REQUESTS, length) for _ in range(LAYERS)]
    queries = [torch.randn(REQUESTS, H, D, device="cuda").bfloat16() for _ in held]
    weights = [torch.randn(columns, H * D, device="cuda").bfloat16() for _ in held]
    runs = {
        "ours": Launcher(sealed(H, K, length, zeros=True), compiler),
        "ours, idle rows as found": Launcher(sealed(H, K, length, zeros=False), compiler),
    }

    def ours(layer: int, run: Launcher) -> torch.Tensor:
        return run(queries[layer], *held[layer].caches, held[layer].table, owners, positions)[0]

    def library(layer: int) -> torch.Tensor:
        keys = {"seqused_k": used, "block_table": held[layer].library_table[:REQUESTS]}
        return flash_attention(queries[layer], *held[layer].library_caches, starts, 1, length, **keys)

    found = [ours(0, run).view(torch.int16) for run in runs.values()]
    if not torch.equal(*found):
        raise ValueError(f"{model}, {length} tokens: zeros in idle rows moved a bit")

    def step(attend: Callable[..., torch.Tensor], layer: int, *rest: Any) -> Callable[[], Any]:
        return lambda: torch.matmul(attend(layer, *rest).view(REQUESTS, H * D), weights[layer].T)

    calls = {name: [step(ours, layer, run) for layer in range(LAYERS)] for name, run in runs.items()}
    return calls | {"flash_attention_3": [step(library, layer) for layer in range(LAYERS)]}


def measure(calls: dict[str, list[Callable[[], Any]]], energy: Energy, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds in turns, of microseconds and millijoules a call."""
    graphs = {name: captured(each, 24) for name, each in calls.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
    for number in range(rounds):
        for name in list(graphs)[:: -1 if number % 2 else 1]:
            graph, count = graphs[name]
            _replay(graph, WARM)
            joules, start = energy.joules(), time.perf_counter()
            replays = _replay(graph, WINDOW)
            seconds, joules = time.perf_counter() - start, energy.joules() - joules
            samples[name].append((seconds / (replays * count) * 1e6, joules / (replays * count) * 1e3))
    rows = []
    for name, found in samples.items():
        times, energies = zip(*found, strict=True)
        us, mj = statistics.median(times), statistics.median(energies)
        rows.append({"arm": name, "us": us, "spread_us": max(times) - min(times)})
        rows[-1] |= {"mj": mj, "spread_mj": max(energies) - min(energies), "watts": mj / us * 1e3}
    return rows


def _replay(graph: torch.cuda.CUDAGraph, seconds: float) -> int:
    replays, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(8):
            graph.replay()
        replays += 8
        torch.cuda.synchronize()
    return replays


def main() -> None:
    """Parses the command line, measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--length", type=int, default=346, help="tokens of a request")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    torch.manual_seed(0)
    compiler, energy = Compiler(torch.device("cuda:0")), Energy()
    rows = []
    for model in MODELS:
        head = {"model": model, "requests": REQUESTS, "length": arguments.length}
        rows += [head | row for row in measure(arms(compiler, model, arguments.length), energy, arguments.rounds)]
        print(*rows[-3:], sep="\n", flush=True)
    write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
