"""kill -9 at random moments of a run, resumed after each: its end must have the bits of a run that nobody killed.

    python benchmarks/kill_resume.py                         # writes benchmarks/results/kill_resume_cpu.json
    python benchmarks/kill_resume.py --config FILE --deterministic --out FILE      # on a GPU

`--deterministic` has XLA leave out what is not deterministic and keep what it tuned on the disk, so that every process
runs the same kernels; the median seconds of a step tell what that costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from cpu_environment import environment

from isojax.rl.checkpoint import Checkpoints
from isojax.rl.config_file import load_config
from isojax.rl.metrics import read_metrics, reproducible
from isojax.rl.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "kill_resume_cpu.json"
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_copy.toml"
SECONDS_BETWEEN_LOOKS = 0.02
STEPS_BEFORE_A_KILL = (0, 1, 1, 1, 2)
"""Steps that a process finishes before its end, drawn evenly: a fifth of the kills come before its first one."""

Command = Callable[[bool], Sequence[str]]
"""The command line that runs to the end; given True it resumes."""


def main() -> int:
    """Runs once untouched and once killed, compares, and writes the results; 0 if all bits agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=EXAMPLE, help="a run's TOML file")
    parser.add_argument("--steps", type=int, default=60, help="enough that the run outlives its kills")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--deterministic", action="store_true", help="XLA's deterministic mode, for a GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(arguments, Path(scratch))
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({name: results[name] for name in ("equal", "differences")}), f"written to {arguments.out}")
    return 0 if results["equal"] else 1


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Both runs and their comparison."""
    # A copy beside the tasks, which are found next to a configuration.
    config = arguments.config.with_name(f".kill_resume_{os.getpid()}.toml")
    config.write_text(with_every_step_kept(arguments.config.read_text(), arguments.steps))
    surroundings = run_environment(scratch, arguments.deterministic)
    try:
        folders = [RunFolder(scratch / place / load_config(config).run_name) for place in ("whole", "killed")]

        def command_in(folder: RunFolder) -> Command:
            run = [sys.executable, "-m", "isojax.cli.main", "train", str(config), "--quiet"]
            return lambda resume: [
                *run,
                *(("--resume", str(folder.path)) if resume else ("--runs", str(folder.path.parent))),
            ]

        whole, killed = folders
        finish(command_in(whole)(False), surroundings)
        print(f"whole run: {len(read_metrics(whole.metrics))} steps", flush=True)
        moments = kill_and_resume(
            command_in(killed), killed, surroundings, kills=arguments.kills, random_=random.Random(arguments.seed)
        )
    finally:
        config.unlink()
    differing = differences(whole, killed)
    return environment() | {
        "config": arguments.config.name,
        "device": jax.devices()[0].device_kind,
        "deterministic": arguments.deterministic,
        "steps": arguments.steps,
        "kills": len(moments),
        "equal": not differing,
        "differences": differing,
        "median_seconds_a_step": round(statistics.median(map(seconds_of, read_metrics(whole.metrics))), 3),
        "moments": moments,
    }


def with_every_step_kept(text: str, steps: int) -> str:
    """A configuration's text with `steps` steps and a checkpoint after each."""
    kept = [line for line in text.splitlines() if not line.startswith(("steps =", "checkpoint_every ="))]
    place = kept.index("[train]") + 1
    return "\n".join([*kept[:place], f"steps = {steps}", "checkpoint_every = 1", *kept[place:]]) + "\n"


def run_environment(scratch: Path, deterministic: bool) -> dict[str, str]:
    """What the runs find in their environment: one compilation cache, and XLA's flags."""
    flags = os.environ.get("XLA_FLAGS", "")
    if deterministic:
        tuned = scratch / "autotuned"
        tuned.mkdir()
        flags += f" --xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_per_fusion_autotune_cache_dir={tuned}"
    return {
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "XLA_FLAGS": flags.strip(),
    }


def finish(command: Sequence[str], surroundings: Mapping[str, str]) -> None:
    """Run to the end. Raises RuntimeError, with what it said, if it fails."""
    done = subprocess.run(
        command, env=os.environ | surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def kill_and_resume(
    command: Command, folder: RunFolder, surroundings: Mapping[str, str], *, kills: int, random_: random.Random
) -> list[dict[str, Any]]:
    """Start, kill -9, resume and so on, then let it finish; what each kill left behind.

    A process that was killed before the first checkpoint leaves nothing to resume: the run is started anew, as its user
    would have to. Raises RuntimeError, with what it said, if a process ends by itself before it was killed.
    """
    moments: list[dict[str, Any]] = []
    # Until the run itself tells.
    seconds_to_first_step, seconds_a_step = 10.0, 1.0
    while len(moments) < kills:
        resume = prepared(folder)
        wanted = random_.choice(STEPS_BEFORE_A_KILL)
        target = newest(folder) + wanted
        start = time.monotonic()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command(resume), env=os.environ | surroundings, stdout=log, stderr=log)
            while process.poll() is None and newest(folder) < target:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if wanted:
                seconds_to_first_step = time.monotonic() - start
            # Anywhere in the step that follows, its checkpoint and the deletion of an older one included; or anywhere
            # in the start.
            time.sleep(random_.random() * (seconds_a_step if wanted else seconds_to_first_step))
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"it ended before it was killed:\n{log.read()[-4000:].decode(errors='replace')}")
            process.send_signal(signal.SIGKILL)
            process.wait()
        lines = read_metrics(folder.metrics)
        # The least, since a process's first step compiles and the one that is to be hit is a later one.
        seconds_a_step = min(map(seconds_of, lines), default=seconds_a_step)
        moments.append(
            {
                "resumed": resume,
                "seconds_after_start": round(time.monotonic() - start, 2),
                "steps_in_metrics": len(lines),
                "newest_checkpoint": newest(folder),
                "half_written": [path.name for path in _entries(folder) if not path.name.isdecimal()],
            }
        )
        print(moments[-1], flush=True)
    finish(command(prepared(folder)), surroundings)
    return moments


def seconds_of(line: Mapping[str, Any]) -> float:
    """Seconds of a step, its checkpoint not included."""
    return float(sum(value for name, value in line.items() if name.startswith("seconds_")))


def prepared(folder: RunFolder) -> bool:
    """Whether there is a checkpoint to resume from; without one the folder goes, so that the run can start anew."""
    if newest(folder):
        return True
    shutil.rmtree(folder.path, ignore_errors=True)
    return False


def newest(folder: RunFolder) -> int:
    """Step of the newest complete checkpoint, 0 for none. Reads names alone, beside a process that writes."""
    return max((int(path.name) for path in _entries(folder) if path.name.isdecimal()), default=0)


def differences(left: RunFolder, right: RunFolder) -> list[str]:
    """What differs in two runs' last checkpoints, bit for bit, and in their metrics but for times and memory."""
    found = []
    ours, theirs = (saved_bits(folder) for folder in (left, right))
    found += sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    one, other = ([reproducible(line) for line in read_metrics(folder.metrics)] for folder in (left, right))
    if len(one) != len(other):
        found.append(f"{len(one)} and {len(other)} lines of metrics")
    found += [f"metrics of step {a['step']}" for a, b in zip(one, other, strict=False) if a != b]
    return found


def saved_bits(folder: RunFolder) -> dict[str, Any]:
    """Every array of the newest checkpoint as bytes, by its path, and where the run stood."""
    checkpoints = Checkpoints(folder.checkpoints)
    step = checkpoints.latest()
    if step is None:
        raise RuntimeError(f"no checkpoint in {folder.checkpoints}")
    progress = checkpoints.progress(step)
    checkpoints.close()
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(folder.checkpoints.resolve() / str(step) / "state")
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves} | {"progress": progress}


def _entries(folder: RunFolder) -> list[Path]:
    return sorted(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []


if __name__ == "__main__":
    sys.exit(main())
