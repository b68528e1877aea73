"""The engine on a card against the trainer on the same card, bit for bit, over every path through the engine.

    python benchmarks/engine_parity.py FOLDER --prepare small|qwen3_1b7|qwen3_8b|FILE.gguf     # where JAX can seal
    python benchmarks/engine_parity.py FOLDER --out FILE [--weights FOLDER|FILE.gguf] [--tokens N] [--stock]
    python benchmarks/engine_parity.py --summary FILE FILE ... --out FILE

A folder is a policy with sealed kernels: one that --prepare wrote, or `isojax export CHECKPOINT --arch sm90` did. Where
it holds no weights and none are named, random ones are made, scaled to a real model's entropy. Prints counts a case and
writes them at once; another call adds to the same file. Exits 1 where anything differed, failed or was not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_parity_cases import Sizes, plan
from engine_parity_results import Results, summary


@dataclass(frozen=True)
class Options:
    """What is run on a policy.

    tokens: sampled over all engines, at least. seconds: after which no case is started. entropy: mean of a token, in
    nats, of random weights. graphs: of each engine. step_tokens: of an engine's steps, without graphs and with them.
    weights: where the folder holds none. stock: whether stock vLLM runs beside it.
    """

    tokens: int = 200_000
    seconds: float = 3600.0
    seed: int = 0
    entropy: float = 1.5
    graphs: tuple[bool, ...] = (False, True)
    step_tokens: tuple[int, int] = (2048, 8192)
    weights: Path | None = None
    stock: bool = False
    sizes: Sizes = field(default_factory=Sizes)


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a policy with sealed kernels")
    parser.add_argument("--prepare", metavar="SHAPES", help="write the folder: small, qwen3_1b7, qwen3_8b or a .gguf")
    parser.add_argument("--page-size", type=int, help="tokens a page of a prepared policy, by default a user's")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that seal kernels at once")
    parser.add_argument("--summary", nargs="+", type=Path, metavar="FILE", help="sum up results instead")
    parser.add_argument("--out", type=Path, default=Path("engine_parity.json"))
    parser.add_argument("--weights", type=Path, help="a folder or .gguf file, for a policy folder without weights")
    parser.add_argument("--tokens", type=int, default=Options.tokens, help="sampled tokens, at least")
    parser.add_argument("--seconds", type=float, default=Options.seconds, help="after which no case is started")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples; another one gives other cases")
    parser.add_argument("--entropy", type=float, default=Options.entropy, help="nats a token, of random weights")
    parser.add_argument("--graphs", choices=("on", "off", "both"), default="both")
    parser.add_argument("--stock", action="store_true", help="also stock vLLM against a plain JAX forward")
    arguments = parser.parse_args()
    if arguments.summary:
        found = summary(arguments.summary)
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found["totals"]), "all exact" if found["exact"] else "NOT ALL EXACT")
        return 0 if found["exact"] else 1
    if arguments.folder is None:
        parser.error("a policy folder is needed")
    if arguments.prepare:
        from engine_parity_policies import prepare

        prepare(arguments.folder, arguments.prepare, arguments.processes, arguments.page_size)
        return 0
    # The trainer and the engine share the card: JAX must not take all of it first.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options = Options(
        tokens=arguments.tokens,
        seconds=arguments.seconds,
        seed=arguments.seed,
        entropy=arguments.entropy,
        graphs={"on": (True,), "off": (False,), "both": (False, True)}[arguments.graphs],
        weights=arguments.weights,
        stock=arguments.stock,
    )
    totals = run(arguments.folder, options, arguments.out)
    print(json.dumps(totals), f"{'exact' if totals['exact'] else 'NOT EXACT'}; written to {arguments.out}", flush=True)
    return 0 if totals["exact"] and totals["tokens"] >= options.tokens else 1


def run(folder: Path, options: Options, out: Path) -> dict[str, Any]:
    """All of it on one policy; returns the totals of the file. What fails is written down, and the rest still runs."""
    from card_engine import proved_copy
    from engine_parity_bench import Bench, identity

    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=_memory()) as scratch, proved_copy(folder) as copy:
        bench = Bench.open(copy, options)
        results = Results(out, identity(bench))
        results.note(f"seconds, weights, seed {options.seed}", time.perf_counter() - started)
        stock = bench.start_stock(Path(scratch)) if options.stock else None
        try:
            for number, graphs in enumerate(options.graphs):
                # What the engines before have not sampled.
                left = options.tokens - results.content.get("totals", {}).get("tokens", 0)
                last = number == len(options.graphs) - 1
                try:
                    _run_engine(bench, replace(options, tokens=left if last else 0), graphs, results, started)
                except Exception as error:
                    results.add(f"engine, graphs {'on' if graphs else 'off'}, seed {options.seed}", _failed(error))
            if stock is not None:
                name = "stock vLLM against plain JAX"
                _guarded(results, name, lambda: stock.compare(bench.policy, bench.params, timeout=240.0), fact=True)
        finally:
            if stock is not None:
                stock.stop()
    results.note(f"seconds, all, seed {options.seed}", time.perf_counter() - started)
    return results.content["totals"]


def _run_engine(bench: Any, options: Options, graphs: bool, results: Results, started: float) -> None:
    label = f"graphs {'on' if graphs else 'off'}, seed {options.seed}"
    begin = time.perf_counter()
    shapes = bench.shapes
    # Without graphs even a lone prompt comes in chunks; with them steps are as large as the context allows.
    longest = shapes.max_context if graphs else shapes.max_context // 2
    step_tokens = min(options.step_tokens[graphs], longest, shapes.token_buckets[-1])
    with bench.engine(graphs=graphs, step_tokens=step_tokens, sizes=options.sizes) as engine:
        results.note(f"seconds, engine's start, {label}", time.perf_counter() - begin)
        results.note(f"seconds, kernels compiled, {label}", engine.describe().get("compile_seconds"))
        cases = plan(
            options.sizes,
            page=shapes.page_size,
            # No longer history than the trainer scores in one batch.
            context=min(shapes.max_context, shapes.trainer_tokens[-1]),
            step_tokens=step_tokens,
            tokens=options.tokens,
            seed=options.seed,
            on_card=bench.on_card,
        )
        for case in cases:
            if time.perf_counter() - started > options.seconds:
                print(f"{label}: time is up before {case.name}", flush=True)
                break
            _guarded(results, f"{case.name}, {label}", lambda case=case: bench.measure(engine, case))
        # Last, since an engine whose sync fails stays shut.
        _guarded(results, f"sync between rollouts, {label}", lambda: bench.measure_sync(engine, options))


def _guarded(results: Results, name: str, measure: Callable[[], dict[str, Any]], *, fact: bool = False) -> None:
    """Measures and writes it down; a failure is written down instead, and what comes next still runs."""
    try:
        found = measure()
    except Exception as error:
        found = _failed(error)
    (results.note if fact else results.add)(name, found)
    print(f"{name}: {json.dumps(found)}", flush=True)


def _failed(error: Exception) -> dict[str, Any]:
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"[-2000:], "exact": False}


def _memory() -> Path | None:
    """Where gigabytes of weights are written fastest."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
