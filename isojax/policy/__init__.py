"""Policies: config, packed batches, the Flax module and the facade over it."""

from isojax.policy.batch import PackedBatch, completion_rows, pack
from isojax.policy.config import PolicyConfig, RopeConfig
from isojax.policy.policy import Parameters, Policy

__all__ = ["PackedBatch", "Parameters", "Policy", "PolicyConfig", "RopeConfig", "completion_rows", "pack"]
