"""kill -9 at random moments of runs, resumed after each: their ends must have the bits of a run that nobody killed.

    python benchmarks/kill_resume.py                      # writes benchmarks/results/kill_resume_cpu.json
    python benchmarks/kill_resume.py --config examples/tiny_copy_card.toml --deterministic --runs 10 --steps 12 \
        --out benchmarks/results/kill_resume_h200.json    # on cards

`--runs` kills several runs side by side, spread over the GPUs, and shares the kills among them. All start from the
policy that the whole run exported and proved. `--deterministic` has XLA leave out what is not deterministic and keep
what it tuned on the disk, so that every process runs the same kernels; what that costs is told by the median seconds of
a step, beside those of a run without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch
from arguments import at_least
from kill_resume_runs import Pace, Place, differences, finish, is_exported, kill_and_resume, newest, seconds_of

from isojax.rl.config_file import load_config
from isojax.rl.metrics import read_metrics
from isojax.rl.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "kill_resume_cpu.json"
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_copy.toml"
SECONDS_BETWEEN_LOOKS = 0.1


def main() -> int:
    """Runs once untouched and then killed, compares, and writes the results; 0 if all bits agree."""
    arguments = parser().parse_args()
    # Of the processes that run: comparing them needs no card, and a context would take memory of theirs.
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, Path(scratch))
    print(json.dumps({name: results[name] for name in ("equal", "differences")}), f"written to {arguments.out}")
    return 0 if results["equal"] else 1


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", type=Path, default=EXAMPLE, help="a run's TOML file")
    found.add_argument(
        "--steps", type=at_least(1), default=60, help="enough that a run outlives its kills: three for each"
    )
    found.add_argument("--kills", type=at_least(0), default=20, help="of all runs together")
    found.add_argument("--runs", type=at_least(1), default=1, help="that are killed, side by side")
    found.add_argument("--seed", type=int, default=0, help="of the moments")
    found.add_argument("--deterministic", action="store_true", help="XLA's deterministic mode, for a GPU")
    found.add_argument("--out", type=Path, default=RESULTS)
    return found


@dataclass(frozen=True)
class Files:
    """What the runs share. config, from_policy: TOML files, the second one of runs that start from the whole run's
    policy. scratch: an empty folder."""

    config: Path
    from_policy: Path
    scratch: Path

    def place(self, name: str, gpu: str | None, *, deterministic: bool) -> Place:
        """A run's folder and surroundings. Runs under the same flags share what was compiled and tuned."""
        config = self.config if name == "whole" else self.from_policy
        folder = RunFolder(self.scratch / name / load_config(self.config).run_name)
        return Place(config, folder, run_environment(self.scratch, deterministic, gpu))


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All runs and their comparison; `arguments.out` is written anew whenever more is known."""
    gpus = visible_gpus()
    # Copies beside the tasks, which are found next to a configuration.
    config, from_policy = (
        arguments.config.with_name(f".kill_resume_{os.getpid()}_{name}.toml") for name in ("whole", "killed")
    )
    files = Files(config, from_policy, scratch)
    text = with_every_step_kept(arguments.config.read_text(), arguments.steps)
    config.write_text(text)
    try:
        whole = files.place("whole", gpus[0], deterministic=arguments.deterministic)
        from_policy.write_text(with_policy(text, whole.folder.policy))
        plain = files.place("plain", gpus[-1], deterministic=False) if arguments.deterministic else None
        pace = run_whole(whole, plain, steps=arguments.steps, together=len(gpus) > 1)
        results = environment(gpus) | {
            "config": arguments.config.name,
            "deterministic": arguments.deterministic,
            "steps": arguments.steps,
            "kills": 0,
            "runs": arguments.runs,
            "equal": False,
            "differences": ["the killed runs did not end"],
            "median_seconds_a_step": median_seconds(whole.folder),
        }
        if plain is not None:
            results["median_seconds_a_step_without"] = median_seconds(plain.folder) if newest(plain.folder) else None
        results["moments"] = []
        write(arguments.out, results)
        print(json.dumps(results), flush=True)
        killed = [
            files.place(f"killed-{number}", gpus[number % len(gpus)], deterministic=arguments.deterministic)
            for number in range(arguments.runs)
        ]
        for differing in killed_side_by_side(whole, killed, pace, arguments, results["moments"]):
            results |= {"kills": len(results["moments"]), "equal": differing == [], "differences": differing}
            write(arguments.out, results)
    finally:
        for path in (config, from_policy):
            path.unlink(missing_ok=True)
    return results


def run_whole(whole: Place, plain: Place | None, *, steps: int, together: bool) -> Pace:
    """Runs without kills: the one that all others are compared with, and one without the deterministic mode.

    plain: starts from the whole run's policy; beside it, where it has a GPU of its own (`together`), else after it.
    Its failure is printed, with what it said, and is no reason to kill nothing. Returns what the whole run took. Raises
    RuntimeError, with what it said, where that one fails.
    """
    with ThreadPoolExecutor(2) as pool:
        ends: list[Future[None]] = [pool.submit(finish, whole)]
        exported = _when(lambda: is_exported(whole.folder), ends[0])
        print("whole run: policy exported", flush=True)
        if plain is not None and together:
            ends.append(pool.submit(finish, plain))
        first = _when(lambda: newest(whole.folder) > 0, ends[0])
        print(f"whole run: first step after {first - exported:.1f} s more", flush=True)
        last = _when(lambda: newest(whole.folder) == steps, ends[0])
        ends[0].result()
        print(f"whole run: {len(read_metrics(whole.folder.metrics))} steps", flush=True)
        if plain is not None and not together:
            ends.append(pool.submit(finish, plain))
        for end in ends[1:]:
            if failure := end.exception():
                print(f"run without the deterministic mode: {failure}", flush=True)
    return Pace(first - exported, (last - first) / max(steps - 1, 1))


def killed_side_by_side(
    whole: Place, killed: list[Place], pace: Pace, arguments: argparse.Namespace, moments: list[dict[str, Any]]
) -> Iterator[list[str]]:
    """Kills and resumes all runs at once; yields, after each one's end, what differs, one that failed included.

    Before the last end the runs that are still on their way count as different. moments: is filled.
    """

    def run(number: int) -> None:
        kills = arguments.kills // arguments.runs + (number < arguments.kills % arguments.runs)
        random_ = random.Random(arguments.seed + number)
        for moment in kill_and_resume(killed[number], pace, kills=kills, random_=random_):
            moments.append({"run": number, **moment})
            print(moments[-1], flush=True)

    with ThreadPoolExecutor(len(killed)) as pool:
        ends = {pool.submit(run, number): number for number in range(len(killed))}
        found: list[str] = []
        for done, end in enumerate(as_completed(ends), start=1):
            number = ends[end]
            try:
                end.result()
                differing = differences(whole.folder, killed[number].folder)
            except Exception as failure:
                differing = [f"{type(failure).__name__}: {failure}"]
            print(f"run {number} ended:", differing or "equal", flush=True)
            found += [f"run {number}: {name}" for name in differing]
            waiting = len(killed) - done
            yield [*found, *([f"{waiting} runs did not end"] if waiting else [])]


def with_every_step_kept(text: str, steps: int) -> str:
    """A configuration's text with `steps` steps and a checkpoint after each."""
    kept = [line for line in text.splitlines() if not line.startswith(("steps =", "checkpoint_every ="))]
    place = kept.index("[train]") + 1
    return "\n".join([*kept[:place], f"steps = {steps}", "checkpoint_every = 1", *kept[place:]]) + "\n"


def with_policy(text: str, folder: Path) -> str:
    """A configuration's text whose policy is the exported one in `folder`."""
    kept, section = [], ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        origin = section == "policy" and line.startswith(("source", "random"))
        if not origin and not section.startswith("policy."):
            kept.append(line)
        if line == "[policy]":
            kept.append(f"source = {json.dumps(str(folder))}")
    return "\n".join(kept) + "\n"


def run_environment(scratch: Path, deterministic: bool, gpu: str | None) -> dict[str, str]:
    """What a run finds in its environment: a compilation cache, XLA's flags and its one GPU, None on a CPU."""
    flags = os.environ.get("XLA_FLAGS", "")
    compiled = scratch / ("compiled_deterministic" if deterministic else "compiled")
    if deterministic:
        tuned = scratch / "autotuned"
        tuned.mkdir(exist_ok=True)
        flags += f" --xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_per_fusion_autotune_cache_dir={tuned}"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "XLA_FLAGS": flags.strip(),
        # Several runs share a card.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    }


def visible_gpus() -> list[str] | list[None]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them; one None on a machine without."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",")[:count] if given else [str(number) for number in range(count)]
    return names or [None]


def environment(gpus: list[str] | list[None]) -> Mapping[str, Any]:
    """Where and when this ran."""
    if gpus == [None]:
        from cpu_environment import environment as on_cpu

        return on_cpu()
    from timing import environment as on_card

    return on_card() | {"cards": len(gpus)}


def median_seconds(folder: RunFolder) -> float:
    """Median seconds of a run's steps, their checkpoints not included."""
    return round(statistics.median(map(seconds_of, read_metrics(folder.metrics))), 3)


def write(path: Path, results: Mapping[str, Any]) -> None:
    """The result file."""
    path.write_text(json.dumps(results, indent=2) + "\n")


def _when(happened: Callable[[], bool], end: Future[None]) -> float:
    """Waits until it happened, or the run ended; the moment, by the monotonic clock."""
    while not happened() and not end.done():
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
