"""Times the trainer's forward and backward beside its native arm's: python benchmarks/train_step.py OUT.json.

Both arms get the same random weights and the same packed batch, are compiled by the same process and take turns. The
exact arm's kernels are lowered here, to the bytes that an export seals. `--shapes small --sequences 4 --length 32` runs
on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_profile import kernel_times
from engine_parity_policies import SHAPES, random_parameters

from isojax import PackedBatch, Policy
from isojax.policy.dense import REMATS
from isojax.policy.native import native_policy

# B: sequences, S: tokens of a sequence, T: all of them.

EXACT, NATIVE = "exact", "the trainer's native arm"
Function = Callable[..., Any]


def packed(tokens_BS: np.ndarray) -> PackedBatch:
    """Sequences side by side; a token's target is the next one, of the last one any."""
    count, length = tokens_BS.shape
    positions_T = np.tile(np.arange(length, dtype=np.int32), count)
    segments_T = np.repeat(np.arange(count, dtype=np.int32), length)
    targets_BS = np.roll(tokens_BS, -1, axis=1)
    arrays = tokens_BS.reshape(-1), positions_T, segments_T, targets_BS.reshape(-1), positions_T < length - 1
    return jax.tree.map(jnp.asarray, PackedBatch(*arrays))


def arms(policy: Policy, length: int) -> dict[str, Function]:
    """By name, the log-probabilities fp32 [T] as a function of the parameters and a batch of sequences of `length`."""

    def scored_by(policy: Policy) -> Function:
        return lambda params, batch: policy.score(params, policy.buffers, batch, 1.0)

    return {EXACT: scored_by(policy), NATIVE: scored_by(native_policy(policy, length))}


def with_gradients(log_probs: Function) -> Function:
    """A weighted sum of the log-probabilities and its gradient with respect to the parameters."""

    def loss(params: Any, batch: PackedBatch) -> jax.Array:
        weights_T = jnp.sin(jnp.arange(len(batch.tokens), dtype=jnp.float32)) * batch.mask / len(batch.tokens)
        return jnp.sum(log_probs(params, batch) * weights_T)

    return jax.value_and_grad(loss)


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
    wide = expected.astype(jnp.float32)
    return jnp.linalg.norm((found.astype(jnp.float32) - wide).ravel()) / jnp.linalg.norm(wide.ravel())


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call in each round; the calls take turns, so that a slow moment meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(1000 * (time.perf_counter() - start))
    return found


class Results:
    """The result file, written anew after every row."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = Path(path), list[dict[str, Any]]()
        self.environment = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        }

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        text = json.dumps({"environment": self.environment, "rows": self.rows}, indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")


def compare(what: str, functions: dict[str, Function], operands: tuple[Any, ...], results: Results, rounds: int) -> Any:
    """Compiles and times every arm; returns first results and calls by arm. One that fails is a row that says so."""
    calls: dict[str, Callable[[], Any]] = {}
    first, sizes = {}, {}
    for name, function in functions.items():
        try:
            start = time.perf_counter()
            compiled = jax.jit(function).lower(*operands).compile()
            print(f"{what}, {name}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
            memory = compiled.memory_analysis()
            sizes[name] = memory.temp_size_in_bytes + memory.output_size_in_bytes
            first[name] = jax.block_until_ready(compiled(*operands))
            calls[name] = lambda compiled=compiled: compiled(*operands)
        except Exception as error:
            traceback.print_exc()
            results.add(what=what, arm=name, failed=f"{type(error).__name__}: {error}"[:500])
    times = measure(calls, rounds)
    for name, ms in times.items():
        median = statistics.median(ms)
        row = {"what": what, "arm": name, "ms": round(median, 3), "spread_ms": round(max(ms) - min(ms), 3)}
        row |= {"rounds": rounds, "working_gib": round(sizes[name] / 2**30, 2)}
        if EXACT in times and name != EXACT:
            row["exact_over_this"] = round(statistics.median(times[EXACT]) / median, 4)
        results.add(**row)
    return first, calls


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--shapes", default="qwen3_1b7", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shapes have")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--remat", default="layer", choices=REMATS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="also each arm's longest kernels")
    options = parser.parse_args(arguments)
    results = Results(options.out)
    config = SHAPES[options.shapes]()
    policy = Policy(dataclasses.replace(config, num_layers=options.layers or config.num_layers), remat=options.remat)
    params = jax.block_until_ready(random_parameters(policy, 0))
    generator = np.random.default_rng(0)
    tokens_BS = generator.integers(0, config.vocab_size, (options.sequences, options.length)).astype(np.int32)
    batch = packed(tokens_BS)
    forwards = arms(policy, options.length)
    print(f"{policy.config.num_layers} layers, {tokens_BS.size} tokens, remat {options.remat}", flush=True)
    scores, calls = compare("forward", forwards, (params, batch), results, options.rounds)
    backwards = {name: with_gradients(function) for name, function in forwards.items()}
    gradients, more = compare("forward and backward", backwards, (params, batch), results, options.rounds)
    for name in scores:
        if name != EXACT and EXACT in scores:
            distance = float(jnp.mean(jnp.abs(scores[EXACT] - scores[name])))
            results.add(what="mean distance of log-probabilities", arm=name, nats=distance)
    for name in gradients:
        if name != EXACT and EXACT in gradients:
            own, other = gradients[EXACT][1], gradients[name][1]
            relative = {key: round(float(_relative(own[key], other[key])), 5) for key in own}
            results.add(what="distance of gradients over their norm", arm=name, **relative)
    del gradients
    stats = jax.devices()[0].memory_stats() or {}
    results.add(what="device memory", peak_gib=round(stats.get("peak_bytes_in_use", 0) / 2**30, 2))
    if options.profile:
        for what, profiled in (("forward", calls), ("forward and backward", more)):
            for name, call in profiled.items():
                try:
                    results.add(what=f"kernels of {what}", arm=name, kernels=kernel_times(call))
                except Exception as error:
                    traceback.print_exc()
                    results.add(what=f"kernels of {what}", arm=name, failed=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
