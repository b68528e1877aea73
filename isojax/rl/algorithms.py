"""The algorithms: each one's formula, its settings, and the defaults of the paper that it comes from.

All three are `isojax.rl.losses.policy_loss` with other parameters. What differs beside them is how a reward becomes an
advantage, which groups are learned from, and what a long completion costs.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag

from isojax.rl.advantages import group_advantages, leave_one_out_advantages
from isojax.rl.config_section import NotNegativeFloat, Positive, PositiveFloat, Section
from isojax.rl.losses import Objective
from isojax.rl.overlong import overlong_penalties

Clip = Annotated[float, Field(gt=0, lt=1)]


class ReinforceSection(Section):
    """REINFORCE: R. J. Williams, "Simple statistical gradient-following algorithms" (1992), one update a rollout.

        gradient = mean over completions of (r_i - b_i) * sum over their tokens of grad log pi(token)

    baseline: "none" is b = 0; "leave_one_out" is the mean reward of the group's other completions, RLOO
    (arXiv 2402.14740), which leaves the gradient unbiased and lowers its variance.
    """

    name: Literal["reinforce"]
    baseline: Literal["none", "leave_one_out"] = "none"
    # The gradient is that of the policy that sampled; a second update would have another one.
    minibatches: ClassVar[int] = 1
    epochs: ClassVar[int] = 1
    sampling_tries: ClassVar[None] = None

    @property
    def objective(self) -> Objective:
        """The ratio unclipped: where it is 1, the gradient of ratio * A is A * grad log pi."""
        return Objective("completion_sum")

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray, max_tokens: int, group_size: int) -> np.ndarray:
        """float32 [N] from rewards float64 [N], grouped by prompt."""
        if self.baseline == "leave_one_out":
            return leave_one_out_advantages(rewards, group_size)
        return rewards.astype(np.float32)


class GrpoSection(Section):
    """GRPO with outcome rewards: DeepSeekMath (arXiv 2402.03300), equations 3 and 4.

        A_i = (r_i - mean(group)) / std(group)
        J   = mean over completions of mean over their tokens of
                min(ratio A, clip(ratio, 1 - clip, 1 + clip) A) - kl_weight k3

    clip: epsilon; the paper gives no value, and 0.2 is PPO's. kl_weight: beta of the k3 estimate against the frozen
    starting policy; the paper trains with 0.04, and 0 (the default) spares the frozen copy and its forward.
    minibatches: optimizer updates a rollout, over disjoint parts of it. epochs: passes over each rollout. The paper has
    1 of each and groups of 64.
    """

    name: Literal["grpo"] = "grpo"
    clip: Clip = 0.2
    kl_weight: NotNegativeFloat = 0.0
    minibatches: Positive = 1
    epochs: Positive = 1
    sampling_tries: ClassVar[None] = None

    @property
    def objective(self) -> Objective:
        """The same clipping to both sides, and every completion weighs the same."""
        return Objective("completion_mean", self.clip, self.clip, self.kl_weight)

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray, max_tokens: int, group_size: int) -> np.ndarray:
        """float32 [N] from rewards float64 [N], grouped by prompt."""
        return group_advantages(rewards, group_size)


class DapoSection(Section):
    """DAPO (arXiv 2503.14476), equations 8 to 13.

        A_i = (r'_i - mean(group)) / std(group),  r'_i = r_i + overlong_penalty * P(|o_i|)
        J   = mean over all tokens of the minibatch of min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)
        P   = 0 up to (1 - overlong_fraction) * max_tokens, then falls in a line to -1 at max_tokens

    clip_low, clip_high: the decoupled clipping, 0.2 and 0.28 in the paper.
    sampling_tries: dynamic sampling. Groups whose rewards are all equal have no gradient; the next prompts are sampled
      in their place, in at most so many calls of the engine in all, and what is then still missing is dropped. The
      paper goes on until the batch is full.
    overlong_fraction: of max_tokens; the paper's 4,096 of 20,480 tokens is 0.2. overlong_penalty: 1 in the paper, whose
      rewards are -1 and 1; 0 turns it off.
    minibatches, epochs: as in GRPO; the paper has 16 updates a rollout, groups of 16, and no KL term.
    """

    name: Literal["dapo"]
    clip_low: Clip = 0.2
    clip_high: PositiveFloat = 0.28
    sampling_tries: Positive = 10
    overlong_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    overlong_penalty: NotNegativeFloat = 1.0
    minibatches: Positive = 1
    epochs: Positive = 1

    @property
    def objective(self) -> Objective:
        """More room upwards than downwards, and every token weighs the same."""
        return Objective("token_mean", self.clip_low, self.clip_high)

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray, max_tokens: int, group_size: int) -> np.ndarray:
        """float32 [N] from rewards float64 [N], grouped by prompt; lengths: int [N], tokens of each completion."""
        penalties = overlong_penalties(lengths, max_tokens, self.overlong_fraction)
        return group_advantages(rewards + self.overlong_penalty * penalties, group_size)


ALGORITHMS: dict[str, type[Section]] = {"reinforce": ReinforceSection, "grpo": GrpoSection, "dapo": DapoSection}


def _name(section: object) -> str | None:
    name = section.get("name", "grpo") if isinstance(section, dict) else getattr(section, "name", None)
    return name if isinstance(name, str) else None


AlgorithmSection = Annotated[
    Annotated[ReinforceSection, Tag("reinforce")]
    | Annotated[GrpoSection, Tag("grpo")]
    | Annotated[DapoSection, Tag("dapo")],
    Discriminator(_name),
]
"""The `algorithm` section of a configuration; its `name`, "grpo" where it has none, decides which keys there are."""
