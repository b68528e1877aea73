"""A tiny policy whose every region has an sm90 kernel, its bundle with made-up modules, and exported folders."""

from functools import cache
from pathlib import Path

import jax
from bundle_samples import SHAPES, unlowered
from policy_samples import raw_config

import isojax
from isojax.kernels import Bundle
from isojax.kernels.calls import kernel_calls
from isojax.policy import Policy, PolicyConfig

RAW = raw_config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    torch_dtype="bfloat16",
)


@cache
def sealable_policy() -> Policy:
    return Policy(PolicyConfig.from_hugging_face(RAW))


@cache
def sealable_params() -> dict[str, jax.Array]:
    return sealable_policy().init(jax.random.key(0))


@cache
def unlowered_bundle() -> Bundle:
    """One program a call of the policy, as sealing would give, but with made-up bytes: nothing is lowered."""
    calls = kernel_calls(sealable_policy(), SHAPES)
    return Bundle(tuple(unlowered(call.region, call.types, dict(call.parameters)) for call in calls), SHAPES)


def sealed_folder(folder: Path, kernels: Bundle | None = None) -> Path:
    """The policy exported for sm90."""
    kernels = kernels or unlowered_bundle()
    isojax.export_policy(folder, sealable_policy(), sealable_params(), {}, arch="sm90", kernels=kernels)
    return folder
