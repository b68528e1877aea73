"""The engine on a card against the trainer on the same card, bit for bit, over every path through the engine.

    python benchmarks/engine_parity.py --prepare FOLDER                  # off the card, where kernels can be sealed
    python benchmarks/engine_parity.py FOLDER [FOLDER ...] --out FILE    # on the card

A folder is a policy with sealed kernels: `isojax export CHECKPOINT --arch sm90 --out FOLDER`, or the small random one
that --prepare writes. Prints counts a case and writes them with the card, the versions, the date and the command.
Exits 1 where anything differed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from isojax.evidence.small_policy import PAGE, REQUESTS, STEP_TOKENS

BATCHES = (1, 8, REQUESTS)


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="policies with sealed kernels")
    parser.add_argument("--prepare", type=Path, help="write the small policy into this folder instead")
    parser.add_argument("--out", type=Path, default=Path("engine_parity.json"))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion in the decode cases")
    parser.add_argument("--rows", type=int, default=128, help="full rows a case")
    parser.add_argument("--cache-gib", type=float, default=4.0)
    parser.add_argument("--graphs", choices=("on", "off", "both"), default="both")
    parser.add_argument("--separate-process", action="store_true", help="run vLLM in a process of its own")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare)
        return 0
    # The trainer and the engine share the card: JAX must not take all of it first.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results: dict[str, Any] = {
        "card": card(),
        "date": date.today().isoformat(),
        "command": shlex.join(sys.argv),
        "versions": {name: version(name) for name in ("jax", "torch", "vllm")},
        "policies": {},
    }
    exact = True
    modes = {"on": (True,), "off": (False,), "both": (False, True)}[arguments.graphs]
    for folder in arguments.folders:
        for graphs in modes:
            settings = {
                "max_step_tokens": STEP_TOKENS,
                "max_sequences": max(BATCHES),
                "kv_cache_bytes": int(arguments.cache_gib * 2**30),
                "cuda_graphs": graphs,
                "separate_process": arguments.separate_process,
            }
            name = f"{folder.name}, graphs {'on' if graphs else 'off'}"
            found = measure(folder, settings, tokens=arguments.tokens, rows=arguments.rows, label=name)
            exact &= all(case["exact"] for case in found["cases"].values())
            results["policies"][name] = found
            # Written after every engine, so that a run that is cut short leaves what it found.
            arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'all exact' if exact else 'DIFFERENCES FOUND'}; written to {arguments.out}", flush=True)
    return 0 if exact else 1


def measure(folder: Path, settings: dict[str, Any], *, tokens: int, rows: int, label: str = "") -> dict[str, Any]:
    """Counts of every case of one engine. Raises what the engine raises when it refuses."""
    from isojax import load
    from isojax.evidence.engine_parity import compare_with_trainer
    from isojax.kernels import load_kernels, packing_of

    with proved_copy(folder) as copy, running_engine(copy, settings) as (engine, compile_seconds):
        policy, params = load(copy)
        start = time.perf_counter()
        engine.sync(params)
        seconds_sync = time.perf_counter() - start
        shapes = load_kernels(copy, engine.contract).shapes
        cases: dict[str, Any] = {}
        for name, prompts, sampling in paths(policy.config.vocab_size, shapes.max_context, tokens):
            start = time.perf_counter()
            if name.startswith("cache hit"):
                engine.generate(prompts, sampling)
            completions = engine.generate(prompts, sampling, full_rows=rows)
            seconds = time.perf_counter() - start
            if name.startswith("cache hit") and min(engine.cached_tokens) < PAGE:
                raise RuntimeError(f"{name}: no prefix was found in the cache: {engine.cached_tokens}")
            counts = compare_with_trainer(
                policy,
                params,
                completions,
                temperature=contract_temperature(engine.contract),
                batch_tokens=shapes.trainer_tokens[-1],
                packing=packing_of(shapes),
            )
            cases[name] = {**dataclasses.asdict(counts), "exact": counts.exact, "seconds_engine": seconds}
            print(f"{label}: {name}: {counts}", flush=True)
        return {"cases": cases, "seconds_compile": compile_seconds, "seconds_sync": seconds_sync}


def paths(vocabulary: int, context: int, tokens: int) -> Iterator[tuple[str, list[list[int]], Any]]:
    """Name, prompts and sampling of every case."""
    from isojax.rl.rollout import Sampling

    generator = np.random.default_rng(0)

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [generator.integers(3, vocabulary, length).tolist() for length in lengths]

    def uneven(batch: int, longest: int) -> list[int]:
        return [longest if not index else 1 + (37 * index + 11) % longest for index in range(batch)]

    long = min(3 * STEP_TOKENS + 5, context - tokens - 1)
    for batch in BATCHES:
        yield f"prefill, batch {batch}", prompts(uneven(batch, 200)), Sampling(max_tokens=1, seed=1)
        chunked = prompts([long, *uneven(batch, 90)[1:]])
        yield f"chunked prefill, batch {batch}", chunked, Sampling(max_tokens=4, seed=2)
        yield f"cache hit, batch {batch}", prompts([100] * batch), Sampling(max_tokens=4, seed=3)
        yield f"decode, batch {batch}", prompts(uneven(batch, 60)), Sampling(max_tokens=tokens, seed=4)


@contextmanager
def running_engine(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[Any, float]]:
    """An engine that has shaken hands, and the seconds that compiling its kernels took."""
    from bridge.engine import VllmEngine
    from contracts import handshake, load_contract

    engine = VllmEngine(folder, **settings)
    try:
        handshake(load_contract(folder), engine.report())
        yield engine, engine.describe()["compile_seconds"]
    finally:
        engine.close()


@contextmanager
def proved_copy(folder: Path) -> Iterator[Path]:
    """The policy with this card claimed as proved, which is what the comparison is there to find out.

    Only claims change, which are no part of the numerical policy; everything else is the folder's own files.
    """
    from contracts import FILE_NAME, load_contract, save_contract

    contract = load_contract(folder)
    claims = contract.claims.model_copy(update={"state": "proved", "device_kinds": (card(),)})
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.name
        copy.mkdir()
        for path in folder.iterdir():
            if path.name != FILE_NAME:
                (copy / path.name).symlink_to(path.resolve())
        save_contract(contract.replaced(claims=claims), copy)
        yield copy


def contract_temperature(contract: Any) -> float:
    """The contract's one temperature."""
    from contracts import bits_float

    return bits_float(contract.semantics.temperature)


def card() -> str:
    """The card's name, as torch and JAX both give it."""
    import torch

    return torch.cuda.get_device_name()


def prepare(folder: Path) -> None:
    """Exports a small random Qwen3 policy with its kernels: every region, sizes and a vocabulary that fill no tile."""
    from isojax import export_policy
    from isojax.evidence.small_policy import SHAPES, small_parameters, small_policy
    from isojax.kernels.sealing import seal_policy

    policy = small_policy()
    kernels = seal_policy(policy, SHAPES, show_progress=True)
    export_policy(folder, policy, small_parameters(policy), {}, arch="sm90", kernels=kernels)
    print(f"{len(kernels.modules)} kernels in {folder}")


if __name__ == "__main__":
    sys.exit(main())
