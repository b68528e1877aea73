"""Reinforcement learning on equal bits: rollouts, advantages, losses, the trainer and its records."""

from isojax.rl.advantages import group_advantages
from isojax.rl.losses import LossInputs, LossParts, grpo_loss, token_weights
from isojax.rl.rollout import Completion, RolloutEngine, Sampling, open_engine

__all__ = [
    "Completion",
    "LossInputs",
    "LossParts",
    "RolloutEngine",
    "Sampling",
    "group_advantages",
    "grpo_loss",
    "open_engine",
    "token_weights",
]
