"""The training loop: sample, reward, check every bit, update, sync."""

from __future__ import annotations

import sys
import time

import numpy as np
from tqdm import tqdm

from contracts import ExecutionContract
from contracts.errors import BadCheckpoint, WeightDigestMismatch
from isojax.policy.policy import Policy
from isojax.rl.advantages import group_advantages
from isojax.rl.arms import agree
from isojax.rl.check_rollout import check_rollout, require_answers, score
from isojax.rl.checkpoint import Checkpoints, Progress
from isojax.rl.clock import Clock
from isojax.rl.config import Config
from isojax.rl.data_order import example_indices
from isojax.rl.finite import naming_step
from isojax.rl.interrupts import finishing_first
from isojax.rl.learner import Learner
from isojax.rl.metrics import MetricsFile, StepMetrics, step_metrics
from isojax.rl.mismatch import Mismatch
from isojax.rl.optimizer import Parameters
from isojax.rl.prompts import PromptEncoder, encode_prompts
from isojax.rl.report import write_report
from isojax.rl.rollout import Completion, RolloutEngine, Sampling, derive_seed
from isojax.rl.run_folder import RunFolder
from isojax.rl.tasks import Example, Task
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

        contract: what `policy` and `engine` run; None in the native arm. Raises as `isojax.rl.arms.agree`: nothing is
        sampled before both agree.
        """
        self.config, self.policy, self.contract, self.engine = config, policy, contract, engine
        self.task, self.encoder, self.folder = task, encoder, folder
        self.stop_token_ids = stop_token_ids
        self.temperature, numerical_policy = agree(config, policy, contract, engine)
        self.learner = Learner(
            policy,
            params,
            optimizer=config.optimizer,
            algorithm=config.algorithm,
            temperature=self.temperature,
            micro_batch_tokens=config.train.micro_batch_tokens,
        )
        self._reference = dict(self.learner.params) if config.algorithm.kl_weight else None
        self.metrics = MetricsFile(folder.metrics)
        self.tensorboard = TensorBoard(folder.tensorboard) if config.metrics.tensorboard else None
        self.checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        start = digest(params)
        self.progress = Progress(0, 0, 0, config.seed, start, start, numerical_policy)
        # The learner's state that belongs to `progress`; while it holds another, there is nothing consistent to save.
        self._settled = self.learner.state
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
        self.learner.restore(state)
        self.metrics.cut_after(step)
        self.progress, self._settled = progress, state
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
                        self.checkpoints.save(self.learner.state, self.progress)
                        saved = metrics.step
                    if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                        write_report(self.folder)
                        reported = time.monotonic()
        finally:
            try:
                if saved != self.progress.step and self.learner.state is self._settled:
                    self.checkpoints.save(self.learner.state, self.progress)
            finally:
                write_report(self.folder)

    def step(self) -> StepMetrics:
        """One step: its metrics are written and the engine holds the new weights when it returns.

        Raises DifferenceFound at the first bit that differs (unless check.on_mismatch is "record"), and what the
        engine, the task and the checks raise; the weights are then still those of the step before.
        """
        clock = Clock()
        rollout = self.config.rollout
        examples = self._examples()
        with clock("rollout"):
            completions = self._generate(examples)
        rewards = self._rewards(examples, completions)
        with clock("check"):
            mismatch = self._check(completions)
        with finishing_first():
            with clock("train"):
                reference = None if self._reference is None else self._score(self._reference, completions)
                advantages = group_advantages(rewards, rollout.group_size)
                result = self.learner.update(
                    completions, advantages, reference, require_exact=self.config.check.on_mismatch == "stop"
                )
            with clock("sync"):
                progress = self._advanced(result.updates)
                self._sync(progress)
            mismatch = mismatch.joined(result.mismatch)
            metrics = step_metrics(
                completions, rewards, rollout.group_size, mismatch, result, progress, clock.seconds, self.policy.arm
            )
            # First, so that no step counts whose line the disk did not take.
            self.metrics.append(metrics)
            if self.tensorboard is not None:
                self.tensorboard.append(metrics)
            self.progress, self._settled = progress, self.learner.state
        return metrics

    def close(self) -> None:
        """Stop the engine and release the writers."""
        self.checkpoints.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.engine.close()

    def _examples(self) -> list[Example]:
        indices = example_indices(
            self.config.seed,
            self.progress.data_position,
            self.config.rollout.prompts_per_step,
            len(self.task.examples),
        )
        return [self.task.examples[index] for index in indices]

    def _generate(self, examples: list[Example]) -> list[Completion]:
        rollout = self.config.rollout
        prompts = encode_prompts(
            self.encoder,
            examples,
            system=self.config.task.system,
            max_tokens=rollout.max_tokens,
            max_position=self.policy.config.max_position,
            vocab_size=self.policy.config.vocab_size,
        )
        sampling = Sampling(
            max_tokens=rollout.max_tokens,
            temperature=self.temperature,
            seed=derive_seed("rollout", self.config.seed, self.progress.step),
            samples=rollout.group_size,
            stop_token_ids=self.stop_token_ids,
        )
        # Stock engines hand out no full rows.
        full_rows = self.config.check.full_rows if self.policy.arm == "exact" else 0
        completions = self.engine.generate(prompts, sampling, full_rows=full_rows)
        require_answers(completions, prompts, rollout.group_size, self.progress.weight_digest)
        return completions

    def _rewards(self, examples: list[Example], completions: list[Completion]) -> np.ndarray:
        return np.array(
            [
                self.task.score(
                    examples[completion.prompt_index], completion.tokens, self.encoder.decode(completion.tokens)
                )
                for completion in completions
            ]
        )

    def _check(self, completions: list[Completion]) -> Mismatch:
        found = check_rollout(
            self.policy,
            self.learner.params,
            completions,
            self.temperature,
            self.config.train.micro_batch_tokens,
        )
        if self.config.check.on_mismatch == "stop":
            found.require_exact(self.progress.step + 1)
        return found

    def _score(self, params: Parameters, completions: list[Completion]) -> list[np.ndarray]:
        capacity = self.config.train.micro_batch_tokens
        return score(self.policy, params, completions, self.temperature, capacity)

    def _advanced(self, updates: int) -> Progress:
        before = self.progress
        return Progress(
            step=before.step + 1,
            policy_version=before.policy_version + updates,
            data_position=before.data_position + self.config.rollout.prompts_per_step,
            seed=before.seed,
            weight_digest=digest(self.learner.params),
            reference_digest=before.reference_digest,
            numerical_policy=before.numerical_policy,
        )

    def _sync(self, progress: Progress | None = None) -> None:
        """Give the engine the learner's weights and check that it holds them."""
        expected = (progress or self.progress).weight_digest
        held = self.engine.sync(self.learner.params)
        if held != expected:
            raise WeightDigestMismatch(
                field="weight digest after sync", found=held, allowed=expected, reason="The engine holds other weights."
            )
