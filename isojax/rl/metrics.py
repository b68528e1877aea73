"""One JSON line a step, readable at any moment and cut back exactly on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import BadCheckpoint
from contracts.user_files import parse_json_object, read_bytes
from isojax.rl.checkpoint import Progress
from isojax.rl.collect import Rollout
from isojax.rl.entropy import sampled_entropy
from isojax.rl.files import write_atomically, written
from isojax.rl.learner import UpdateResult
from isojax.rl.memory import memory_marks


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. Seconds are wall-clock; counts are of sampled tokens or of full rows.

    reward_mean, reward_std: of the task's own rewards, over every completion that was sampled for the step.
    sampled_groups: prompts sampled for it. kept_groups: groups whose rewards differ, the ones with a gradient.
    tokens: sampled, and compared with the trainer.
    mismatch_*: engine against trainer_score, and where no update lies between also against trainer_fwd, by bits.
    full_rows: compared over the whole vocabulary.
    policy_kl, policy_kl_k1: estimates k3 and k1 of KL(rollout policy || updated policy) as seen by the updates,
      averaged over their tokens; 0 with one update a rollout and no lag, because the ratio is exactly 1. kl, kl_k1: the
      same estimates of KL(updated policy || frozen reference), or None when the objective has no KL term.
    entropy: of the policy that sampled, in nats, exact over the full rows, or None without any. entropy_sampled: the
      mean of -log p over all sampled tokens, an unbiased estimate of the same. entropy_train: of the policy that the
      updates saw, exact over all of their tokens, or None where there was no update or the arm is the native one.
    first_ratio_off_one, first_clip_fraction: of the first minibatch after the rollout; both are exactly 0 unless the
      rollout was sampled from older weights.
    clip_fraction: over all updates. gradient_norm: before clipping, the largest of the step's updates.
    updates: optimizer updates of the step; 0 where no group was kept, and the weights are then as they were.
    policy_version, weight_digest: updates behind the weights after the step. rollout_version: updates behind the
      weights that sampled each of the step's tokens. version_lag: updates between them and the step's first update.
    seconds_*: of what was done in this step; with a lag that is the next step's rollout, and where the engine samples
      while the trainer trains, only the time that the trainer then still waited for it.
    tokens_per_second_rollout: sampled, or None where the step sampled none. tokens_per_second_train: of prompts and
      completions together, each counted once.
    memory_*_bytes: high-water marks since the process started (`isojax.rl.memory`); None where a device keeps none.
    arm: "exact", or "native" for the baseline without regions, of which nothing is promised.
    """

    step: int
    reward_mean: float
    reward_std: float
    completion_length_mean: float
    sampled_groups: int
    kept_groups: int
    tokens: int
    mismatch_tokens: int
    mismatch_max_abs: float
    full_rows: int
    full_row_mismatches: int
    loss: float
    kl: float | None
    kl_k1: float | None
    policy_kl: float
    policy_kl_k1: float
    entropy: float | None
    entropy_sampled: float
    entropy_train: float | None
    clip_fraction: float
    first_clip_fraction: float
    first_ratio_off_one: int
    gradient_norm: float
    updates: int
    seconds_rollout: float
    seconds_check: float
    seconds_train: float
    seconds_sync: float
    tokens_per_second_rollout: float | None
    tokens_per_second_train: float
    memory_process_bytes: int
    memory_device_bytes: int | None
    policy_version: int
    rollout_version: int
    version_lag: int
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
    rollout: Rollout,
    before: Progress,
    result: UpdateResult,
    after: Progress,
    seconds: Mapping[str, float],
    arm: str = "exact",
) -> StepMetrics:
    """The line of one step between two states of progress; `seconds` has rollout, check, train and sync where timed."""
    mismatch = rollout.mismatch.joined(result.mismatch)
    groups = rollout.rewards.reshape(-1, rollout.groups.shape[1])
    kl = result.reference_kl
    memory = memory_marks()
    sampled = int(rollout.lengths.sum())
    trained = sum(len(completion.prompt_tokens) for completion in rollout.completions) + sampled
    return StepMetrics(
        step=after.step,
        reward_mean=float(rollout.rewards.mean()),
        reward_std=float(rollout.rewards.std()),
        completion_length_mean=float(rollout.lengths.mean()),
        sampled_groups=len(groups),
        kept_groups=int(np.count_nonzero(np.ptp(groups, axis=1))),
        tokens=mismatch.tokens,
        mismatch_tokens=mismatch.mismatch_tokens,
        mismatch_max_abs=mismatch.max_abs,
        full_rows=mismatch.full_rows,
        full_row_mismatches=mismatch.full_row_mismatches,
        loss=result.loss,
        kl=None if kl is None else kl.k3,
        kl_k1=None if kl is None else kl.k1,
        policy_kl=result.policy_kl.k3,
        policy_kl_k1=result.policy_kl.k1,
        entropy=rollout.entropy,
        entropy_sampled=sampled_entropy(rollout.completions),
        entropy_train=result.entropy,
        clip_fraction=result.clip_fraction,
        first_clip_fraction=result.first_clip_fraction,
        first_ratio_off_one=result.first_ratio_off_one,
        gradient_norm=result.gradient_norm,
        updates=result.updates,
        seconds_rollout=seconds.get("rollout", 0.0),
        seconds_check=seconds.get("check", 0.0),
        seconds_train=seconds["train"],
        seconds_sync=seconds["sync"],
        tokens_per_second_rollout=sampled / seconds["rollout"] if seconds.get("rollout") else None,
        tokens_per_second_train=trained / seconds["train"],
        memory_process_bytes=memory.process,
        memory_device_bytes=memory.device,
        policy_version=after.policy_version,
        rollout_version=rollout.policy_version,
        version_lag=before.policy_version - rollout.policy_version,
        data_position=after.data_position,
        weight_digest=after.weight_digest,
        numerical_policy=after.numerical_policy,
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
