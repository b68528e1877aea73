"""Training checkpoints: everything that a run needs to go on, bit for bit, as orbax directories."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from contracts.errors import BadCheckpoint
from isojax.rl.collect import Rollout
from isojax.rl.files import cannot_write
from isojax.rl.optimizer import LearnerState
from isojax.rl.rollout_record import rollout_from_json, rollout_to_json

FORMAT = 2


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step; with the learner's state and a rollout that waits for its step it is all that
    resuming needs.

    step: steps done. policy_version: optimizer updates done. data_position: prompts consumed by the steps done.
    seed: of the run; every random draw is a function of it and of the numbers above, so it is the state of the RNG.
    weight_digest: of the weights that the next rollout uses. reference_digest: of the frozen reference policy.
    numerical_policy: the contract's identity under which the run computed so far.
    """

    step: int
    policy_version: int
    data_position: int
    seed: int
    weight_digest: str
    reference_digest: str
    numerical_policy: str


class Checkpoints:
    """The numbered checkpoints of one run. A directory that was not finished does not count as one.

    Each is written under a temporary name and renamed when it is whole, so a process may end at any moment.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """keep: how many of the newest stay on the disk."""
        self.folder = folder.resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return self._manager.latest_step()

    def unfinished(self) -> list[str]:
        """Names of what a process that ended while it wrote has left half-written here."""
        complete = {str(step) for step in self._manager.all_steps()}
        return sorted(path.name for path in self.folder.iterdir() if path.name not in complete)

    def save(self, state: LearnerState, progress: Progress, waiting: Rollout | None = None) -> None:
        """Write one checkpoint under its step; it appears whole or not at all.

        waiting: the rollout of the next step where it was sampled already. Raises CannotWrite, with the older
        checkpoints as they were.
        """
        try:
            self._manager.save(
                progress.step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state._asdict()),
                    progress=ocp.args.JsonSave({"format": FORMAT, **asdict(progress)}),
                    waiting=ocp.args.JsonSave({"rollout": None if waiting is None else rollout_to_json(waiting)}),
                ),
            )
            self._manager.wait_until_finished()
        # Orbax passes on what its storage raises, which for a full disk is a ValueError.
        except Exception as error:
            raise cannot_write(self.folder / str(progress.step), str(error)[-300:]) from error

    def restore(self, step: int, like: LearnerState) -> tuple[LearnerState, Progress]:
        """The state and progress of a step, placed as `like` is: a state of the same shapes, whose values are not used.

        Raises BadCheckpoint if the step is not there, or is damaged, or belongs to another policy or optimizer.
        """
        progress = self.progress(step)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        except Exception as error:  # Orbax documents no error for damage, and raises bare Exceptions for some of it.
            raise self._damaged(step, error) from error
        return LearnerState(**restored["state"]), progress

    def progress(self, step: int) -> Progress:
        """The progress of a step alone. Raises BadCheckpoint."""
        if step not in self._manager.all_steps():
            raise BadCheckpoint(
                field="checkpoint",
                found=f"step {step} in {self.folder}",
                allowed=f"one of {sorted(self._manager.all_steps())}",
                reason="There is no complete checkpoint of that step.",
            )
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
            values: dict[str, Any] = dict(restored["progress"])
            if values.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return Progress(**values)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise self._damaged(step, error) from error

    def waiting(self, step: int) -> Rollout | None:
        """The rollout that was sampled for the step after this one, if any. Raises BadCheckpoint."""
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(waiting=ocp.args.JsonRestore()))
            values = restored["waiting"]["rollout"]
            return None if values is None else rollout_from_json(values)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise self._damaged(step, error) from error

    def close(self) -> None:
        """Release orbax's threads."""
        self._manager.close()

    def _damaged(self, step: int, error: Exception) -> BadCheckpoint:
        return BadCheckpoint(
            field=f"checkpoint {self.folder / str(step)}",
            found="unreadable or of another policy",
            allowed="a checkpoint that this run wrote",
            reason=str(error)[:500],
        )
