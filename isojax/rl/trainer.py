"""The training loop: a rollout whose every bit was checked, an update, a sync."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from tqdm import tqdm

from contracts import ExecutionContract
from contracts.errors import BadCheckpoint, WeightDigestMismatch
from isojax.policy.policy import Policy
from isojax.rl.arms import agree
from isojax.rl.check_rollout import score
from isojax.rl.checkpoint import Checkpoints, Progress
from isojax.rl.clock import Clock
from isojax.rl.collect import Collector, Rollout
from isojax.rl.config import Config
from isojax.rl.finite import naming_step
from isojax.rl.interrupts import finishing_first
from isojax.rl.learner import Learner, UpdateResult
from isojax.rl.metrics import MetricsFile, StepMetrics, step_metrics
from isojax.rl.optimizer import Parameters
from isojax.rl.prompts import PromptEncoder
from isojax.rl.report import write_report
from isojax.rl.rollout import Completion, RolloutEngine
from isojax.rl.run_folder import RunFolder
from isojax.rl.tasks import Task
from isojax.rl.tensorboard import TensorBoard
from isojax.weights.digest import digest

_SECONDS_BETWEEN_REPORTS = 5.0


class Trainer:
    """One run. `run()` does all steps; `step()` does one and can be called by a loop of one's own."""

    def __init__(
        self,
        config: Config,
        *,
        policy: Policy,
        params: Parameters,
        contract: ExecutionContract | None,
        engine: RolloutEngine,
        task: Task,
        encoder: PromptEncoder,
        stop_token_ids: tuple[int, ...],
        folder: RunFolder,
    ) -> None:
        """`params` are the starting weights, which also stay as the frozen reference where a KL term asks for one.

        policy: an `isojax.MeshPolicy` where the configuration has a mesh.
        contract: what `policy` and `engine` run; None in the native arm. Raises as `isojax.rl.arms.agree`: nothing is
        sampled before both agree.
        """
        self.config, self.policy, self.contract, self.engine, self.folder = config, policy, contract, engine, folder
        self.temperature, numerical_policy = agree(config, policy, contract, engine)
        self.learner = Learner(
            policy,
            params,
            optimizer=config.optimizer,
            algorithm=config.algorithm,
            temperature=self.temperature,
            micro_batch_tokens=config.train.micro_batch_tokens,
        )
        self.collector = Collector(
            config,
            policy=policy,
            engine=engine,
            task=task,
            encoder=encoder,
            stop_token_ids=stop_token_ids,
            temperature=self.temperature,
        )
        self._reference = dict(self.learner.params) if config.algorithm.objective.kl_weight else None
        self.metrics = MetricsFile(folder.metrics)
        self.tensorboard = TensorBoard(folder.tensorboard) if config.metrics.tensorboard else None
        self.checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        start = digest(params)
        self.progress = Progress(0, 0, 0, config.seed, start, start, numerical_policy)
        # The learner's state that belongs to `progress`; while it holds another, there is nothing consistent to save.
        self._settled = self.learner.state
        # With a lag, the rollout of the step after `progress`: sampled, rewarded and checked.
        self._waiting: Rollout | None = None
        self._sync()

    def resume(self) -> None:
        """Continue from the newest checkpoint, exactly: the same bits as if the run had never stopped.

        Raises BadCheckpoint if there is none, or it was computed under another contract, seed or starting policy.
        """
        step = self.checkpoints.latest()
        unfinished = ", ".join(self.checkpoints.unfinished())
        if step is None:
            raise BadCheckpoint(
                field="--resume",
                found=f"no complete checkpoint in {self.folder.checkpoints}"
                + (f", half-written: {unfinished}" if unfinished else ""),
                allowed="1 or more",
                reason="The run stopped before its first checkpoint; start it anew.",
            )
        if unfinished:
            print(f"isojax: half-written and not used: {unfinished}; continuing after step {step}", file=sys.stderr)
        state, progress = self.checkpoints.restore(step, self.learner.state)
        for name in ("numerical_policy", "reference_digest", "seed"):
            if getattr(progress, name) != getattr(self.progress, name):
                raise BadCheckpoint(
                    field=f"checkpoint of step {step}, {name}",
                    found=getattr(self.progress, name),
                    allowed=getattr(progress, name),
                    reason="The run cannot continue exactly under another one. Export the checkpoint with "
                    "`isojax export` and start a new run from it.",
                )
        waiting = self.checkpoints.waiting(step)
        if (waiting is not None) != bool(self.config.rollout.lag):
            raise BadCheckpoint(
                field=f"checkpoint of step {step}, the next step's rollout",
                found="there" if waiting else "none",
                allowed=f"what rollout.lag = {self.config.rollout.lag} leaves behind",
                reason="The run was started with another lag.",
            )
        self.learner.restore(state)
        self.metrics.cut_after(step)
        self.progress, self._settled, self._waiting = progress, state, waiting
        self._sync()

    def run(self, *, show_progress: bool = True) -> None:
        """All remaining steps, a checkpoint every `checkpoint_every` and after the last, the report kept up to date.

        Ctrl-C (KeyboardInterrupt) stops a rollout at once; in an update it waits until the step is finished. Then, and
        on every error that left the weights as they were, the last finished step is checkpointed and the report
        written before the exception goes on.
        """
        steps = self.config.train.steps
        reported = time.monotonic()
        saved = self.progress.step
        try:
            with tqdm(total=steps, initial=self.progress.step, unit="step", disable=not show_progress) as bar:
                while self.progress.step < steps:
                    with naming_step(self.progress.step + 1):
                        metrics = self.step()
                    bar.set_postfix_str(metrics.summary())
                    bar.update()
                    if metrics.step % self.config.train.checkpoint_every == 0 or metrics.step == steps:
                        self.checkpoints.save(self.learner.state, self.progress, self._waiting)
                        saved = metrics.step
                    if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                        write_report(self.folder)
                        reported = time.monotonic()
        finally:
            try:
                if saved != self.progress.step and self.learner.state is self._settled:
                    self.checkpoints.save(self.learner.state, self.progress, self._waiting)
            finally:
                write_report(self.folder)

    def step(self) -> StepMetrics:
        """One step: its metrics are written and the engine holds the new weights when it returns.

        Raises DifferenceFound at the first bit that differs (unless check.on_mismatch is "record"), and what the
        engine, the task and the checks raise; the weights are then still those of the step before, unless it was about
        a rollout that was sampled while the step trained, which nothing was learned from.
        """
        clock = Clock()
        rollout = self._waiting or self._check(clock, self._sample(clock), self.learner.params)
        with self._following(clock, rollout) as following, finishing_first():
            with clock("train"):
                result = self._update(rollout)
            # The engine takes no weights while it samples.
            waiting = following()
            with clock("sync"):
                progress = self._advanced(rollout, result.updates)
                self._sync(progress)
            metrics = step_metrics(rollout, self.progress, result, progress, clock.seconds, self.policy.arm)
            # First, so that no step counts whose line the disk did not take.
            self.metrics.append(metrics)
            if self.tensorboard is not None:
                self.tensorboard.append(metrics)
            self.progress, self._settled, self._waiting = progress, self.learner.state, waiting
        return metrics

    def close(self) -> None:
        """Stop the engine and release the writers."""
        self.checkpoints.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.engine.close()

    def _sample(self, clock: Clock, before: Rollout | None = None) -> Rollout:
        """The rollout of the step that comes next, or of the one after `before`, from the weights as they are."""
        now = self.progress
        step, position = (now.step, now.data_position) if before is None else (before.step, before.data_position)
        with clock("rollout"):
            return self.collector.sample(step + 1, position, now.policy_version, now.weight_digest)

    def _check(self, clock: Clock, rollout: Rollout, params: Parameters) -> Rollout:
        with clock("check"):
            return self.collector.check(rollout, params)

    @contextmanager
    def _following(self, clock: Clock, rollout: Rollout) -> Iterator[Callable[[], Rollout | None]]:
        """With a lag, the rollout after this one, from the weights that the block starts with; None without.

        It is sampled while the block runs, by an engine that can, else before it. What the block is given returns it,
        checked.
        """
        if not self.config.rollout.lag:
            yield lambda: None
        elif self.engine.runs_beside_trainer:
            # Held on to until the rollout was compared with them.
            params = self.learner.params
            with ThreadPoolExecutor(1, thread_name_prefix="rollout") as pool:
                sampling = pool.submit(self._sample, Clock(), rollout)

                def wait() -> Rollout:
                    with clock("rollout"):
                        sampled = sampling.result()
                    return self._check(clock, sampled, params)

                yield wait
        else:
            following = self._check(clock, self._sample(clock, rollout), self.learner.params)
            yield lambda: following

    def _update(self, rollout: Rollout) -> UpdateResult:
        settings, completions = self.config.rollout, rollout.completions
        return self.learner.update(
            completions,
            self.config.algorithm.advantages(
                rollout.rewards, rollout.lengths, settings.max_tokens, settings.group_size
            ),
            None if self._reference is None else self._score(self._reference, completions),
            groups=rollout.groups,
            # By what it was sampled from and not by the setting: also with a lag the first rollout is of these weights.
            on_policy=rollout.weight_digest == self.progress.weight_digest,
            require_exact=self.config.check.on_mismatch == "stop",
        )

    def _score(self, params: Parameters, completions: Sequence[Completion]) -> list[np.ndarray]:
        capacity = self.config.train.micro_batch_tokens
        return score(self.policy, params, completions, self.temperature, capacity)

    def _advanced(self, rollout: Rollout, updates: int) -> Progress:
        before = self.progress
        return Progress(
            step=before.step + 1,
            policy_version=before.policy_version + updates,
            data_position=rollout.data_position,
            seed=before.seed,
            weight_digest=digest(self.learner.params),
            reference_digest=before.reference_digest,
            numerical_policy=before.numerical_policy,
        )

    def _sync(self, progress: Progress | None = None) -> None:
        """Give the engine the learner's weights and check that it holds them."""
        expected = (progress or self.progress).weight_digest
        held = self.engine.sync(self.learner.whole_params())
        if held != expected:
            raise WeightDigestMismatch(
                field="weight digest after sync", found=held, allowed=expected, reason="The engine holds other weights."
            )
