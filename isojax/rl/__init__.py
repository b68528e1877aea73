"""Reinforcement learning on equal bits: rollouts, advantages, losses, the trainer and its records."""

from isojax.rl.advantages import group_advantages, leave_one_out_advantages
from isojax.rl.losses import LossInputs, LossParts, Objective, policy_loss, token_weights
from isojax.rl.rollout import Completion, RolloutEngine, Sampling, open_engine

__all__ = [
    "Completion",
    "LossInputs",
    "LossParts",
    "Objective",
    "RolloutEngine",
    "Sampling",
    "group_advantages",
    "leave_one_out_advantages",
    "open_engine",
    "policy_loss",
    "token_weights",
]
