"""One arm of `engine.py`, in a process of its own: seconds and device time of workloads, as they are asked for.

Ours generates as a rollout does, through `VllmEngine`, which hands out tokens with their log-probabilities;
`isojax_llm` is the same vLLM asked for them as stock vLLM is.

    python benchmarks/engine_arm.py ARM FOLDER --workload BATCHxINxOUT ... --out FILE

It writes to FILE once its engine stands. Then it takes lines from standard input until that is closed, each a workload:
it runs the workload once more, and writes anew how many lines it has served and a row for every workload. A number
behind the workload is the seconds that its steps shall start apart, at least; such runs have a row of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from isojax.rl.files import write_atomically

# Read by vLLM when it is imported.
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "stock": {"VLLM_PLUGINS": ""},
    "batch_invariant": {"VLLM_PLUGINS": "", "VLLM_BATCH_INVARIANT": "1"},
    "isojax": {},
    "isojax_llm": {},
}
OURS = ("isojax", "isojax_llm")
#: Prompts, tokens of a completion and a seed, to the lengths of the completions with as many log-probabilities.
Generate = Callable[[list[list[int]], int, int], set[int]]
CACHE_BYTES = 24 << 30
# Arms stand on the card together, so each asks vLLM for a share of it; the cache's size is given.
SHARE = 0.3
STEP_TOKENS = 8192
PACED_SEED = 1000


class Workload(NamedTuple):
    """Requests at once, and tokens of each one's prompt and completion."""

    batch: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """From BATCHxINxOUT, such as 32x128x512."""
        return cls(*map(int, text.split("x")))


def main() -> None:
    """Starts the arm's engine and measures what it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=ENVIRONMENTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", type=Workload.parse, action="append", required=True, help="of all that may come")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", **ENVIRONMENTS[arguments.arm]}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with _started(arguments.arm, arguments.folder, arguments.workload) as generate:
        found: dict[tuple[Workload, bool], Measured] = {}
        served = 0
        report(arguments.out, served, found)
        for line in sys.stdin:
            text, *apart = line.split()
            workload, seconds = Workload.parse(text), sum(map(float, apart))
            # Other prompts than at its own pace: an engine remembers those.
            first_seed = PACED_SEED if seconds else 0
            found.setdefault((workload, seconds > 0), Measured(workload, first_seed)).run(generate, seconds)
            served += 1
            report(arguments.out, served, found)
        if not served:
            # Whoever would say when is gone, and would measure beside this.
            raise SystemExit("nobody is left to say when to measure")


def report(path: Path, served: int, found: Mapping[tuple[Workload, bool], Measured]) -> None:
    """Writes the file whole: the benchmark reads it while this runs."""
    rows = [measured.row() for measured in found.values()]
    write_atomically(path, json.dumps({"served": served, "rows": rows}))


@contextmanager
def _started(arm: str, folder: Path, workloads: list[Workload]) -> Iterator[Generate]:
    """An engine, as what it is asked with."""
    batch = max(workload.batch for workload in workloads)
    length = max(workload.prompt + workload.output for workload in workloads)
    if arm in OURS:
        from card_engine import proved_copy, running_engine

        # Proved for this card, which is what `engine_parity.py` is for.
        with proved_copy(folder) as copy, running_engine(copy, our_settings(batch, length)) as engine:
            # The weights that it has read itself: there is no trainer here that they could differ from.
            engine._digest = engine._rpc("isojax_weight_digest")
            yield partial(_rollout, engine) if arm == "isojax" else partial(_generated, engine._llm)
        return
    from vllm import LLM

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=batch,
        kv_cache_memory_bytes=CACHE_BYTES,
        gpu_memory_utilization=SHARE,
        enable_prefix_caching=True,
        seed=0,
    )
    yield partial(_generated, llm)


def our_settings(batch: int, length: int) -> dict[str, Any]:
    """Settings of our engine for this many requests at once, each of at most `length` tokens."""
    return {
        "max_sequences": batch,
        "max_context": length,
        "max_step_tokens": STEP_TOKENS,
        "kv_cache_bytes": CACHE_BYTES,
    }


class Measured:
    """What was measured of a workload. The first run is not counted: it warms up. Runs have seeds of their own."""

    def __init__(self, workload: Workload, first_seed: int = 0) -> None:
        self._workload = workload
        self._first_seed = first_seed
        self._seconds: list[float] = []
        self._steps: list[float] = []
        self._between: list[float] = []
        self._apart: list[float] = []

    def run(self, generate: Generate, apart: float = 0.0) -> None:
        """Once more, after the warm-up. apart: seconds from one step's start to the next one's, at least."""
        if not self._seconds:
            _seconds(generate, self._workload, self._first_seed)
        with replays_timed() as replays, steps_apart(apart) as starts:
            seed = self._first_seed + 1 + len(self._seconds)
            self._seconds.append(_seconds(generate, self._workload, seed))
        if len(starts) > 1:
            # As below: decode's, since few steps compute prompts.
            self._between.append(statistics.median(b - a for a, b in itertools.pairwise(starts)))
        if apart:
            self._apart.append(apart)
        if replays:
            # Most replays are decode steps: a median leaves the few of prompts out.
            self._steps.append(statistics.median(start.elapsed_time(end) for start, end in replays))

    def row(self) -> dict[str, Any]:
        """Medians and spreads."""
        seconds, steps = self._seconds, self._steps
        found = {"seconds": statistics.median(seconds), "seconds_spread": max(seconds) - min(seconds)}
        if self._between:
            found["seconds_between_steps"] = statistics.median(self._between)
        if self._apart:
            found["seconds_apart"] = statistics.median(self._apart)
        if steps:
            found |= {"device_ms_a_step": statistics.median(steps), "device_ms_spread": max(steps) - min(steps)}
        rate = self._workload.batch * self._workload.output / found["seconds"]
        return {**self._workload._asdict(), "runs": len(seconds), **found, "tokens_per_second": rate}


def _seconds(generate: Generate, workload: Workload, seed: int) -> float:
    """One run over prompts that no run had before, every token with its log-probability as a rollout needs it."""
    import numpy as np

    generator = np.random.default_rng([seed, workload.batch])
    prompts = [generator.integers(10, 1000, workload.prompt).tolist() for _ in range(workload.batch)]
    start = time.perf_counter()
    lengths = generate(prompts, workload.output, seed)
    elapsed = time.perf_counter() - start
    if lengths != {workload.output}:
        raise RuntimeError(f"completions of {lengths} tokens where {workload.output} were asked for")
    return elapsed


def _rollout(engine: Any, prompts: list[list[int]], tokens: int, seed: int) -> set[int]:
    """The lengths of the completions, as many log-probabilities as tokens."""
    from isojax.rl.rollout import Sampling

    completions = engine.generate(prompts, Sampling(max_tokens=tokens, seed=seed, stop_token_ids=()))
    return {min(len(completion.tokens), len(completion.log_probs)) for completion in completions}


def _generated(llm: Any, prompts: list[list[int]], tokens: int, seed: int) -> set[int]:
    """The same of vLLM's own class."""
    from vllm import SamplingParams

    wanted = SamplingParams(
        temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, seed=seed
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return {min(len(output.outputs[0].token_ids), len(output.outputs[0].logprobs)) for output in outputs}


@contextmanager
def steps_apart(seconds: float) -> Iterator[list[float]]:
    """Has vLLM's steps start at least so many seconds after each other; gives when they did, in seconds."""
    from vllm.v1.engine.llm_engine import LLMEngine

    step, starts = LLMEngine.step, []

    def later(engine: LLMEngine) -> Any:
        if starts:
            time.sleep(max(0.0, starts[-1] + seconds - time.perf_counter()))
        starts.append(time.perf_counter())
        return step(engine)

    with mock.patch.object(LLMEngine, "step", later):
        yield starts


@contextmanager
def replays_timed() -> Iterator[list[tuple[Any, Any]]]:
    """Pairs of CUDA events around every replay of a captured graph; nothing is waited for."""
    import torch

    replay, pairs = torch.cuda.CUDAGraph.replay, []

    def timed(graph: Any) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay(graph)
        end.record()
        pairs.append((start, end))

    torch.cuda.CUDAGraph.replay = timed
    try:
        yield pairs
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        torch.cuda.CUDAGraph.replay = replay


if __name__ == "__main__":
    sys.exit(main())
