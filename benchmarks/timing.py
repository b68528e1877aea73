"""Times GPU work by CUDA-graph replays over inputs that rotate through more than the L2 cache."""

import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

#: More bytes than this in rotation, so that no replay finds its inputs in the cache (60 MB of L2 on an H200).
ROTATE_BYTES = 256 << 20


def copies(byte_count: int, most: int = 16) -> int:
    """How many copies of an input of ``byte_count`` bytes to rotate through."""
    return max(1, min(most, -(-ROTATE_BYTES // byte_count)))


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 20, rounds: int = 9) -> tuple[float, float]:
    """Median and spread (max - min) over ``rounds`` of the time of one call, all ``calls`` in turn in one graph."""
    return in_turns([calls], repeats, rounds)[0]


def in_turns(
    candidates: Sequence[Sequence[Callable[[], object]]], repeats: int = 20, rounds: int = 9
) -> list[tuple[float, float]]:
    """Of each candidate's calls what `microseconds` gives, a round of each after the other, there and back.

    A card that has computed for a while is at its power limit and slower. Whoever came last would pay for the others.
    """
    graphs = [captured(calls, repeats) for calls in candidates]
    times: list[list[float]] = [[] for _ in candidates]
    for number in range(rounds):
        for index in range(len(graphs))[:: -1 if number % 2 else 1]:
            graph, total = graphs[index]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[index].append(start.elapsed_time(end) * 1000 / total)
    return [(statistics.median(found), max(found) - min(found)) for found in times]


def captured(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of at least ``repeats`` calls, all in turn, which has run once; and how many it holds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    total = 0
    with torch.cuda.graph(graph):
        while total < repeats:
            for call in calls:
                call()
                total += 1
    graph.replay()
    return graph, total


def environment() -> dict[str, str]:
    """Card, versions, date and command, for the head of a result file."""
    import jax

    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "jax": jax.__version__,
        "cuda": torch.version.cuda or "none",
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }


def write_results(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """One JSON file: the environment, then the rows."""
    Path(path).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
