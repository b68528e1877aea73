"""What the card runs in one decode step: every kernel by name, launches and microseconds a step.

    python benchmarks/step_kernels.py FOLDER --batch 8 --out FILE      # FOLDER: a policy with sealed kernels

A run of many steps less one of fewer, by torch's profiler, CUDA graphs on. A kernel's time is what it adds: from the
end of all that started before it, since launches are chained and a kernel that waits for the one before it is running,
too. Exits 1 where anything but a sealed kernel runs once a layer or more, that is, between regions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FEW, MANY = 8, 24
OURS = "isojax"


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, help="a .gguf file or checkpoint; else the folder's, or random ones")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each prompt")
    parser.add_argument("--cache-gib", type=int, default=2, help="memory of the cache")
    parser.add_argument("--out", type=Path, default=Path("step_kernels.json"))
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from card_engine import proved_copy, running_engine
    from engine_parity import Options
    from engine_parity_bench import Bench
    from timing import environment

    from isojax.rl.rollout import Sampling

    settings = {"max_sequences": arguments.batch, "kv_cache_bytes": arguments.cache_gib << 30, "cuda_graphs": True}
    settings["initial_weights"] = False
    with proved_copy(arguments.folder) as copy, running_engine(copy, settings) as engine:
        bench = Bench.open(copy, Options(weights=arguments.weights))
        engine.sync(bench.params)
        prompts = [[3 + (7 * row + at) % 90 for at in range(arguments.prompt)] for row in range(arguments.batch)]
        engine.generate(prompts, Sampling(max_tokens=FEW, seed=1))
        few, many = (_profiled(engine, prompts, tokens) for tokens in (FEW, MANY))
        layers = bench.policy.config.num_layers
    rows = of_a_step(few, many, MANY - FEW)
    between = [row for row in rows if OURS not in row["kernel"] and row["a_step"] >= layers]
    result = {
        **environment(),
        "folder": arguments.folder.name,
        "layers": layers,
        "batch": arguments.batch,
        "kernels_a_step": sum(row["a_step"] for row in rows),
        "sealed_kernels_a_layer": sum(row["a_step"] for row in rows if OURS in row["kernel"]) / layers,
        "device_us_a_step": sum(row["us_a_step"] for row in rows),
        "between_regions": [row["kernel"] for row in between],
        "kernels": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(f"{row['a_step']:8.2f} {row['us_a_step']:10.1f} us  {row['kernel'][:100]}")
    print(f"{result['device_us_a_step']:.0f} us a step; between regions: {result['between_regions'] or 'nothing'}")
    return 1 if between else 0


def of_a_step(
    few: Mapping[str, tuple[int, float]], many: Mapping[str, tuple[int, float]], steps: int
) -> list[dict[str, Any]]:
    """Launches and microseconds a step, the longest first, of what the run of so many more steps launched more often.

    What both runs launched as often, such as a kernel of prompts alone, is of no step: its times differ by chance.
    Those that prompts and steps share keep that error; of attention's tiles it was once 62 us a step.
    """
    rows = []
    for kernel, (launches, us) in many.items():
        before, us_before = few.get(kernel, (0, 0.0))
        if launches > before:
            rows.append(
                {"kernel": kernel, "a_step": (launches - before) / steps, "us_a_step": (us - us_before) / steps}
            )
    return sorted(rows, key=lambda row: -row["us_a_step"])


def _profiled(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, tuple[int, float]]:
    """(launches, microseconds added) of every kernel, by name, of a run that generates this many tokens a prompt."""
    from isojax.rl.rollout import Sampling

    print(f"profiling {tokens} tokens", flush=True)
    sampling = Sampling(max_tokens=tokens, seed=1, stop_token_ids=())
    return added(ran_on_card(lambda: engine.generate(prompts, sampling)))


def ran_on_card(work: Callable[[], object]) -> list[tuple[float, float, str]]:
    """Start and end in microseconds, and name, of all that the card ran for this work."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    ran = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start, event.time_range.end, event.name) for event in ran]


def added(ran: Iterable[tuple[float, float, str]]) -> dict[str, tuple[int, float]]:
    """By name (launches, microseconds added), of starts, ends and names. Beside an earlier one only the rest counts."""
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    busy_until = 0.0
    for start, end, name in sorted(ran):
        launches[name] += 1
        microseconds[name] += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return {name: (launches[name], microseconds[name]) for name in launches}


if __name__ == "__main__":
    sys.exit(main())
