"""Collects what one step learns from: sampled, rewarded, and checked bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from isojax.policy.policy import Policy
from isojax.rl.check_rollout import check_rollout, require_answers
from isojax.rl.config import Config
from isojax.rl.data_order import example_indices
from isojax.rl.entropy import mean_entropy
from isojax.rl.mismatch import Mismatch
from isojax.rl.optimizer import Parameters
from isojax.rl.prompts import PromptEncoder, encode_prompts
from isojax.rl.rollout import Completion, RolloutEngine, Sampling, derive_seed
from isojax.rl.tasks import Example, Task


@dataclass(frozen=True)
class Rollout:
    """The completions of one step, all of them from one version of the weights.

    step: the one that learns from it. completions: every one that was sampled, grouped by prompt. rewards: float64, the
    task's own, one a completion. groups: int [kept, group_size], the indices of the completions to learn from.
    policy_version, weight_digest: of the weights that sampled. data_position: prompts consumed up to its last one.
    mismatch: the engine against trainer_score of those weights. entropy: mean over its full rows in nats, or None
    without rows; both empty before `Collector.check`.
    """

    step: int
    completions: tuple[Completion, ...]
    rewards: np.ndarray
    groups: np.ndarray
    policy_version: int
    weight_digest: str
    data_position: int
    mismatch: Mismatch = field(default_factory=Mismatch)
    entropy: float | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every completion, int."""
        return np.array([len(completion.tokens) for completion in self.completions])


class Collector:
    """Samples, rewards and checks the rollouts of a run."""

    def __init__(
        self,
        config: Config,
        *,
        policy: Policy,
        engine: RolloutEngine,
        task: Task,
        encoder: PromptEncoder,
        stop_token_ids: tuple[int, ...],
        temperature: float,
    ) -> None:
        """temperature: as the contract holds it."""
        self.config, self.policy, self.engine, self.task, self.encoder = config, policy, engine, task, encoder
        self.stop_token_ids, self.temperature = stop_token_ids, temperature

    def sample(self, step: int, position: int, policy_version: int, weight_digest: str) -> Rollout:
        """The rollout of a step, from the weights that the engine holds; nothing is compared yet.

        position: of its first prompt in the data order. weight_digest, policy_version: of the engine's weights.
        With dynamic sampling, groups whose rewards are all equal are not kept, and the next prompts are sampled in
        their place until there are enough or `algorithm.sampling_tries` are used up.
        Raises what the engine, the task and `require_answers` raise.
        """
        group_size, wanted = self.config.rollout.group_size, self.config.rollout.prompts_per_step
        tries = self.config.algorithm.sampling_tries
        completions: list[Completion] = []
        rewards: list[np.ndarray] = []
        kept: list[np.ndarray] = []
        prompts = 0
        for attempt in range(tries or 1):
            missing = wanted - len(kept)
            examples = self._examples(position + prompts, missing)
            # The first call's seed is that of algorithms that have no second one.
            again = (attempt,) if attempt else ()
            seed = derive_seed("rollout", self.config.seed, step - 1, *again)
            sampled = self._generate(examples, seed, weight_digest)
            found = self._rewards(examples, sampled)
            groups = len(completions) + np.arange(len(sampled)).reshape(-1, group_size)
            kept.extend(groups if tries is None else groups[np.ptp(found.reshape(-1, group_size), axis=1) > 0])
            completions += [
                dataclasses.replace(
                    completion, prompt_index=completion.prompt_index + prompts, policy_version=policy_version
                )
                for completion in sampled
            ]
            rewards.append(found)
            prompts += missing
            if len(kept) == wanted:
                break
        return Rollout(
            step=step,
            completions=tuple(completions),
            rewards=np.concatenate(rewards),
            groups=np.array(kept, np.int64).reshape(-1, group_size),
            policy_version=policy_version,
            weight_digest=weight_digest,
            data_position=position + prompts,
        )

    def check(self, rollout: Rollout, params: Parameters) -> Rollout:
        """The rollout, compared with `params`, which must be the weights that sampled it; its full rows are let go.

        Raises NonFiniteLogits, and DifferenceFound for the first bit that differs where check.on_mismatch is "stop".
        """
        mismatch = check_rollout(
            self.policy, params, rollout.completions, self.temperature, self.config.train.micro_batch_tokens
        )
        if self.config.check.on_mismatch == "stop":
            mismatch.require_exact(rollout.step)
        return dataclasses.replace(
            rollout,
            completions=tuple(dataclasses.replace(completion, rows=None) for completion in rollout.completions),
            mismatch=mismatch,
            entropy=mean_entropy(rollout.completions),
        )

    def _examples(self, position: int, count: int) -> list[Example]:
        indices = example_indices(self.config.seed, position, count, len(self.task.examples))
        return [self.task.examples[index] for index in indices]

    def _generate(self, examples: Sequence[Example], seed: int, weight_digest: str) -> list[Completion]:
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
            seed=seed,
            samples=rollout.group_size,
            stop_token_ids=self.stop_token_ids,
        )
        # A call for a part of the prompts has its share of the rows, rounded up. Stock engines hand out none.
        wanted = self.config.check.full_rows if self.policy.arm == "exact" else 0
        rows = -(-wanted * len(examples) // rollout.prompts_per_step)
        completions = self.engine.generate(prompts, sampling, full_rows=rows)
        require_answers(completions, prompts, rollout.group_size, weight_digest)
        return completions

    def _rewards(self, examples: Sequence[Example], completions: Sequence[Completion]) -> np.ndarray:
        """float64, one a completion."""
        return np.array(
            [
                self.task.score(
                    examples[completion.prompt_index], completion.tokens, self.encoder.decode(completion.tokens)
                )
                for completion in completions
            ],
            np.float64,
        )
