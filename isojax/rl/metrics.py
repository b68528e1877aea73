"""One JSON line a step, readable at any moment and cut back exactly on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import BadCheckpoint
from contracts.user_files import parse_json_object, read_bytes
from isojax.rl.checkpoint import Progress
from isojax.rl.files import write_atomically, written
from isojax.rl.learner import UpdateResult
from isojax.rl.memory import memory_marks
from isojax.rl.mismatch import Mismatch
from isojax.rl.rollout import Completion


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. Seconds are wall-clock; counts are of sampled tokens or of full rows.

    reward_mean, reward_std: over the step's completions. tokens: sampled, and compared with the trainer.
    mismatch_*: engine against trainer_score and trainer_fwd, by bits. full_rows: compared over the whole vocabulary.
    policy_kl: k3 estimate of KL(rollout policy || updated policy) as seen by the updates, averaged over their tokens;
      0 with one update a rollout because the ratio is exactly 1. kl: the same estimate against the frozen reference,
      or None when the objective has no KL term.
    first_ratio_off_one, first_clip_fraction: of the first minibatch after the rollout; both are exactly 0.
    clip_fraction: over all updates. gradient_norm: before clipping, the largest of the step's updates.
    kept_groups: groups whose rewards differ, the ones with a gradient. policy_version: updates behind the rollout.
    tokens_per_second_rollout: sampled. tokens_per_second_train: of prompts and completions together, each counted once.
    memory_*_bytes: high-water marks since the process started (`isojax.rl.memory`); None where a device keeps none.
    arm: "exact", or "native" for the baseline without regions, of which nothing is promised.
    """

    step: int
    reward_mean: float
    reward_std: float
    completion_length_mean: float
    kept_groups: int
    tokens: int
    mismatch_tokens: int
    mismatch_max_abs: float
    full_rows: int
    full_row_mismatches: int
    loss: float
    kl: float | None
    policy_kl: float
    clip_fraction: float
    first_clip_fraction: float
    first_ratio_off_one: int
    gradient_norm: float
    seconds_rollout: float
    seconds_check: float
    seconds_train: float
    seconds_sync: float
    tokens_per_second_rollout: float
    tokens_per_second_train: float
    memory_process_bytes: int
    memory_device_bytes: int | None
    policy_version: int
    data_position: int
    weight_digest: str
    numerical_policy: str
    arm: str

    def summary(self) -> str:
        """What a progress bar has room for."""
        arm = "" if self.arm == "exact" else f"{self.arm} arm, "
        return (
            f"{arm}reward {self.reward_mean:.3f}, mismatches {self.mismatch_tokens}/{self.tokens} tokens "
            f"{self.full_row_mismatches}/{self.full_rows} rows"
        )


def step_metrics(
    completions: Sequence[Completion],
    rewards: np.ndarray,
    group_size: int,
    mismatch: Mismatch,
    result: UpdateResult,
    progress: Progress,
    seconds: Mapping[str, float],
    arm: str = "exact",
) -> StepMetrics:
    """The line of one step. `progress` is the one after it; `seconds` has rollout, check, train and sync."""
    memory = memory_marks()
    return StepMetrics(
        step=progress.step,
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        completion_length_mean=float(np.mean([len(completion.tokens) for completion in completions])),
        kept_groups=int(np.count_nonzero(np.ptp(rewards.reshape(-1, group_size), axis=1))),
        tokens=mismatch.tokens,
        mismatch_tokens=mismatch.mismatch_tokens,
        mismatch_max_abs=mismatch.max_abs,
        full_rows=mismatch.full_rows,
        full_row_mismatches=mismatch.full_row_mismatches,
        loss=result.loss,
        kl=result.reference_kl,
        policy_kl=result.policy_kl,
        clip_fraction=result.clip_fraction,
        first_clip_fraction=result.first_clip_fraction,
        first_ratio_off_one=result.first_ratio_off_one,
        gradient_norm=result.gradient_norm,
        seconds_rollout=seconds["rollout"],
        seconds_check=seconds["check"],
        seconds_train=seconds["train"],
        seconds_sync=seconds["sync"],
        tokens_per_second_rollout=sum(len(completion.tokens) for completion in completions) / seconds["rollout"],
        tokens_per_second_train=sum(len(c.prompt_tokens) + len(c.tokens) for c in completions) / seconds["train"],
        memory_process_bytes=memory.process,
        memory_device_bytes=memory.device,
        policy_version=progress.policy_version,
        data_position=progress.data_position,
        weight_digest=progress.weight_digest,
        numerical_policy=progress.numerical_policy,
        arm=arm,
    )


MEASURED = ("seconds_", "tokens_per_second_", "memory_")
"""Beginnings of the fields that a clock or the machine gives; all others are equal in every run of a configuration."""


def reproducible(line: Mapping[str, Any]) -> dict[str, Any]:
    """A step's line without what differs from run to run."""
    return {name: value for name, value in line.items() if not name.startswith(MEASURED)}


class MetricsFile:
    """`metrics.jsonl`: a line is written whole and flushed to the disk, or it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, metrics: StepMetrics) -> None:
        """Add one step's line. Raises CannotWrite; of a line that was cut short nothing counts."""
        line = json.dumps(asdict(metrics), allow_nan=False) + "\n"
        with written(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def cut_after(self, step: int) -> None:
        """Drop the lines beyond `step`, and a half-written last line: a resumed run writes them again."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in order; a last line that a dying process left half-written is skipped.

    Raises BadCheckpoint, naming the file and the line, for one that is not a step's.
    """
    if not path.exists():
        return []
    content = read_bytes(path, refusal=BadCheckpoint, allowed="a metrics file")
    # Without its line end the last line was never finished, even where what is there happens to parse.
    lines = content[: content.rfind(b"\n") + 1].split(b"\n")
    return [_step_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line]


def _step_line(line: bytes, where: str) -> dict[str, Any]:
    values = parse_json_object(line, where=where, refusal=BadCheckpoint)
    missing = [field.name for field in fields(StepMetrics) if field.name not in values]
    if missing or type(values["step"]) is not int:
        raise BadCheckpoint(
            field=where,
            found=f"no {', '.join(missing)}" if missing else f"step {values['step']!r}",
            allowed="the metrics of one step",
            reason="It is not what this version of isojax train writes.",
        )
    return values
