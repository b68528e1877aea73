"""Flax policies, weights, audit, reinforcement learning and the command line."""

from isojax.policy import PackedBatch, Policy, PolicyConfig, completion_rows, pack
from isojax.weights.load import load

__all__ = ["PackedBatch", "Policy", "PolicyConfig", "completion_rows", "load", "pack"]
