"""The typed, frozen configuration of a training run, as written in a TOML file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from contracts.temperature import LARGEST, SMALLEST
from isojax.policy.dense import Remat

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of every section: immutable, unknown keys refused, no silent conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PolicySection(Section):
    """Which policy to train.

    source: a Hugging Face folder, a GGUF file, or `package:NAME` for a GGUF file inside an installed Python package;
      left out with `random`.
    random: a Hugging Face style model configuration; the weights are drawn from `random_seed`.
    dtype: what the forward computes in. Master weights are float32 either way.
    """

    source: str | None = None
    random: dict[str, Any] | None = None
    random_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _one_origin(self) -> PolicySection:
        if (self.source is None) == (self.random is None):
            raise ValueError("give exactly one of `source` (weights to start from) and `random` (a model's config)")
        return self


class TaskSection(Section):
    """Where prompts and rewards come from.

    source = "reasoning_gym": `name`, `size`, `settings` of one of its data sets; its own scoring is the reward.
    source = "jsonl": `path` of a file of one JSON object a line (relative to the configuration file), and `reward`.
    source = "function": `prompts` = "module:function" returning the examples, and `reward`.
    reward = "module:function", called as reward(example, tokens, text) and returning a finite number. Modules are
      looked for beside the configuration file first.
    system: an optional system message, for chat prompts.
    """

    source: Literal["reasoning_gym", "jsonl", "function"]
    name: str | None = None
    size: Positive = 1000
    settings: dict[str, Any] = Field(default_factory=dict)
    path: str | None = None
    prompts: str | None = None
    reward: str | None = None
    system: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> TaskSection:
        needed = {"reasoning_gym": ("name",), "jsonl": ("path", "reward"), "function": ("prompts", "reward")}
        for key in needed[self.source]:
            if getattr(self, key) is None:
                raise ValueError(f"source = {self.source!r} needs the key {key!r}")
        return self


class RolloutSection(Section):
    """What is sampled each step: `prompts_per_step` prompts, `group_size` completions of each.

    temperature divides the logits, on both sides; it becomes part of the contract.
    max_tokens is the most tokens in a completion.
    """

    prompts_per_step: Positive
    group_size: Annotated[int, Field(ge=2)]
    max_tokens: Positive
    temperature: Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False)] = 1.0
    stop_token_ids: tuple[NotNegative, ...] | None = None


class AlgorithmSection(Section):
    """The objective: GRPO of DeepSeekMath (arXiv 2402.03300); see `isojax.rl.losses`.

    clip: epsilon of the ratio's clipping. kl_weight: beta of the k3 estimate against the frozen starting policy.
    minibatches: optimizer updates a rollout, over disjoint parts of it. epochs: passes over each rollout.
    """

    name: Literal["grpo"] = "grpo"
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    kl_weight: NotNegativeFloat = 0.0
    minibatches: Positive = 1
    epochs: Positive = 1


class OptimizerSection(Section):
    """AdamW on float32 master weights, with a linear warm-up and a cap on the gradient's global norm."""

    learning_rate: PositiveFloat
    warmup_updates: NotNegative = 0
    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    max_gradient_norm: PositiveFloat = 1.0


class TrainSection(Section):
    """How long, and how the batch is cut.

    micro_batch_tokens: most tokens in one packed micro-batch; gradients are accumulated over them in float32.
    remat: what the backward computes again instead of keeping it: "none", "layer" or "regions", see `isojax.Policy`.
    checkpoint_every: steps between checkpoints (the last step always has one). keep_checkpoints: how many stay.
    """

    steps: Positive
    micro_batch_tokens: Positive = 1024
    remat: Remat = "none"
    checkpoint_every: Positive = 1
    keep_checkpoints: Positive = 2


class CheckSection(Section):
    """How the promise is checked while training.

    full_rows: full log-probability rows compared each step, over the whole vocabulary.
    on_mismatch: "stop" ends the run at the first difference; "record" writes it down and goes on.
    """

    full_rows: NotNegative = 8
    on_mismatch: Literal["stop", "record"] = "stop"


class EngineSection(Section):
    """Which installed engine samples, and its own settings (passed through to it)."""

    name: str = "vllm"
    settings: dict[str, Any] = Field(default_factory=dict)


class Config(Section):
    """A whole training run. `seed` decides data order and sampling; random weights have a seed of their own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
    seed: NotNegative = 0
    policy: PolicySection
    task: TaskSection
    rollout: RolloutSection
    optimizer: OptimizerSection
    train: TrainSection
    algorithm: AlgorithmSection = AlgorithmSection()
    check: CheckSection = CheckSection()
    engine: EngineSection = EngineSection()

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Config:
        if self.rollout.prompts_per_step % self.algorithm.minibatches:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} must divide rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}: a group is never cut"
            )
        return self
