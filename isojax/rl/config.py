"""The typed, frozen configuration of a training run, as written in a TOML file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from contracts.temperature import LARGEST, SMALLEST
from isojax.policy.dense import Remat
from isojax.rl.algorithms import AlgorithmSection, GrpoSection
from isojax.rl.config_section import NotNegative, NotNegativeFloat, Positive, PositiveFloat, Section, UnitInterval


class PolicySection(Section):
    """Which policy to train.

    source: a Hugging Face folder, a GGUF file, or `package:NAME` for a GGUF file inside an installed Python package;
      left out with `random`.
    random: a Hugging Face style model configuration; the weights are drawn from `random_seed`.
    dtype: what the forward computes in. Master weights are float32 either way.
    arm: "exact", or "native" for the baseline that exactness is compared with: the same policy in plain JAX without
      regions, beside the engine's stock form. Of its bits nothing is promised, and everything that it leaves says so.
    """

    source: str | None = None
    random: dict[str, Any] | None = None
    random_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    arm: Literal["exact", "native"] = "exact"

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
    lag: 0 samples each step's rollout from the newest weights; 1 from those of one step before, so that the rollout of
      a step is there before the step before it has trained.
    """

    prompts_per_step: Positive
    group_size: Annotated[int, Field(ge=2)]
    max_tokens: Positive
    temperature: Annotated[float, Field(ge=SMALLEST, le=LARGEST, allow_inf_nan=False)] = 1.0
    stop_token_ids: tuple[NotNegative, ...] | None = None
    lag: Literal[0, 1] = 0


class OptimizerSection(Section):
    """AdamW on float32 master weights, with a linear warm-up and a cap on the gradient's global norm."""

    learning_rate: PositiveFloat
    warmup_updates: NotNegative = 0
    beta1: UnitInterval = 0.9
    beta2: UnitInterval = 0.999
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    max_gradient_norm: PositiveFloat = 1.0


class MeshSection(Section):
    """The devices that train: dp * fsdp of them, each with sequences of its own.

    fsdp: pieces that master weights, moments and the policy's copies are cut into. dp: devices with the same piece.
    """

    dp: Positive = 1
    fsdp: Positive = 1

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by mesh axis, the innermost last."""
        return {"dp": self.dp, "fsdp": self.fsdp}

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.dp * self.fsdp


class TrainSection(Section):
    """How long, and how the batch is cut.

    micro_batch_tokens: most tokens in one packed micro-batch, on each device; gradients are accumulated over them in
      float32.
    mesh: the devices that train.
    remat: what the backward computes again instead of keeping it: "none", "layer" or "regions", see `isojax.Policy`.
    checkpoint_every: steps between checkpoints (the last step always has one). keep_checkpoints: how many stay.
    compilation_cache: folder that keeps compiled programs between runs, "default" for the user's own, or "off".
    """

    steps: Positive
    micro_batch_tokens: Positive = 1024
    remat: Remat = "none"
    checkpoint_every: Positive = 1
    keep_checkpoints: Positive = 2
    compilation_cache: Annotated[str, Field(min_length=1)] = "default"
    mesh: MeshSection = MeshSection()


class CheckSection(Section):
    """How the promise is checked while training.

    full_rows: full log-probability rows compared each step, over the whole vocabulary.
    on_mismatch: "stop" ends the run at the first difference; "record" writes it down and goes on.
    """

    full_rows: NotNegative = 8
    on_mismatch: Literal["stop", "record"] = "stop"


class MetricsSection(Section):
    """Where a step's metrics go beside `metrics.jsonl`. tensorboard: also into TensorBoard's event files."""

    tensorboard: bool = False


class MemorySection(Section):
    """How a card's memory is split between trainer and engine, checked before the engine starts.

    reserve_bytes: for what has no fixed size: activations, workspaces of compiled programs, captured graphs. What the
    rest takes is computed; see `isojax.rl.memory_split`.
    """

    reserve_bytes: NotNegative = 8 << 30


class EngineSection(Section):
    """Which installed engine samples, its own settings (passed through to it), and its card's memory."""

    name: str = "vllm"
    settings: dict[str, Any] = Field(default_factory=dict)
    memory: MemorySection = MemorySection()


class Config(Section):
    """A whole training run. `seed` decides data order and sampling; random weights have a seed of their own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]
    seed: NotNegative = 0
    policy: PolicySection
    task: TaskSection
    rollout: RolloutSection
    optimizer: OptimizerSection
    train: TrainSection
    algorithm: AlgorithmSection = GrpoSection()
    check: CheckSection = CheckSection()
    engine: EngineSection = EngineSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def run_name(self) -> str:
        """The name of the run's folder: that of a native run says so."""
        return self.name if self.policy.arm == "exact" else f"{self.name}-{self.policy.arm}"

    @model_validator(mode="after")
    def _native_only_records(self) -> Config:
        if self.policy.arm == "native" and self.check.on_mismatch != "record":
            raise ValueError(
                "policy.arm = 'native' needs check.on_mismatch = 'record': stock stacks differ in almost every token, "
                "so a run that stops at the first difference would end in its first step"
            )
        return self

    @model_validator(mode="after")
    def _native_has_one_device(self) -> Config:
        if self.policy.arm == "native" and self.train.mesh.devices > 1:
            raise ValueError(
                f"policy.arm = 'native' trains on one device and train.mesh has {self.train.mesh.devices}: leave it "
                "out. The native arm is a baseline of one device's arithmetic, and none of it is cut over several"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_divide(self) -> Config:
        if self.rollout.prompts_per_step % self.algorithm.minibatches:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} must divide rollout.prompts_per_step = "
                f"{self.rollout.prompts_per_step}: a group is never cut"
            )
        return self
