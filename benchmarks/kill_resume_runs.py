"""One run of `kill_resume.py`: finished, or killed and resumed, and compared with another by its bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from contracts import FILE_NAME, load_contract
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.metrics import read_metrics, reproducible
from isojax.rl.run_folder import RunFolder

SECONDS_BETWEEN_LOOKS = 0.02
STEPS_BEFORE_A_KILL = (0, 1, 1, 1, 2)
"""Steps that a process finishes before its end, drawn evenly: a fifth of the kills come before its first one."""


@dataclass(frozen=True)
class Pace:
    """How long a run takes, in seconds: from its start to its first checkpoint, and from one to the next."""

    to_first_step: float
    a_step: float


@dataclass(frozen=True)
class Place:
    """A run's configuration, its folder, and what it finds in its environment beside what is there anyway."""

    config: Path
    folder: RunFolder
    surroundings: Mapping[str, str] = field(default_factory=dict)

    def command(self, resume: bool) -> Sequence[str]:
        """The command line that runs to the end; with `resume` from the newest checkpoint on."""
        where = ("--resume", str(self.folder.path)) if resume else ("--runs", str(self.folder.path.parent))
        return [sys.executable, "-m", "isojax.cli.main", "train", str(self.config), "--quiet", *where]


def finish(place: Place) -> None:
    """Run to the end, resuming where that is possible. Raises RuntimeError, with what it said, if it fails."""
    command = place.command(prepared(place.folder))
    done = subprocess.run(
        command,
        env=os.environ | place.surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def kill_and_resume(place: Place, pace: Pace, *, kills: int, random_: random.Random) -> Iterator[dict[str, Any]]:
    """Start, kill -9, resume and so on, then let it finish; yields what each kill left behind.

    pace: decides how long after a step, or after a start, the kill may come. A process that was killed before the first
    checkpoint leaves nothing to resume: the run is started anew, as its user would have to. Raises RuntimeError, with
    what it said, if a process ends by itself before it was killed.
    """
    folder = place.folder
    for _ in range(kills):
        resume = prepared(folder)
        wanted = random_.choice(STEPS_BEFORE_A_KILL)
        before = newest(folder)
        start = time.monotonic()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                place.command(resume), env=os.environ | place.surroundings, stdout=log, stderr=log
            )
            while process.poll() is None and newest(folder) < before + wanted:
                time.sleep(SECONDS_BETWEEN_LOOKS)
            # Anywhere in the step that follows, its checkpoint and the deletion of an older one included; or anywhere
            # in the start, the end of which is the first step.
            end = time.monotonic() + random_.random() * (pace.a_step if wanted else pace.to_first_step)
            while time.monotonic() < end and process.poll() is None and (wanted or newest(folder) == before):
                time.sleep(min(SECONDS_BETWEEN_LOOKS, max(0.0, end - time.monotonic())))
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"it ended before it was killed:\n{log.read()[-4000:].decode(errors='replace')}")
            process.send_signal(signal.SIGKILL)
            process.wait()
        yield {
            "resumed": resume,
            "seconds_after_start": round(time.monotonic() - start, 2),
            "steps_in_metrics": len(read_metrics(folder.metrics)),
            "newest_checkpoint": newest(folder),
            "half_written": [path.name for path in _entries(folder) if not path.name.isdecimal()],
        }
    finish(place)


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


def is_exported(folder: RunFolder) -> bool:
    """Whether a run has exported its policy and proved it."""
    return (folder.policy / FILE_NAME).is_file() and load_contract(folder.policy).claims.state == "proved"


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
    path = folder.checkpoints.resolve() / str(step) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        # Into the host's memory, wherever they were when they were saved.
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(path, restore_args=plain)
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves} | {"progress": progress}


def _entries(folder: RunFolder) -> list[Path]:
    return sorted(folder.checkpoints.iterdir()) if folder.checkpoints.is_dir() else []
