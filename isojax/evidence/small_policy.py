"""A small random policy whose kernels are quickly sealed: every region, sizes and a vocabulary that fill no tile."""

from __future__ import annotations

import jax

from isojax.kernels import KernelShapes
from isojax.policy import Policy, PolicyConfig, RopeConfig
from isojax.policy.policy import Parameters

STEP_TOKENS = 512
PAGE = 16
REQUESTS = 256

CONFIG = PolicyConfig(
    family="qwen3",
    vocab_size=1999,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    max_position=2048,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10000.0),
    attention_bias=True,
    # Short contexts have several.
    attention_split=512,
)
SHAPES = KernelShapes(
    token_buckets=(8, 64, STEP_TOKENS),
    head_rows=(8, 32, 64, 256),
    trainer_tokens=(2048,),
    page_size=PAGE,
    max_requests=REQUESTS,
)


def small_policy() -> Policy:
    """The policy, without parameters."""
    return Policy(CONFIG)


def small_parameters(policy: Policy) -> Parameters:
    """Random parameters, the same in every process."""
    return policy.init(jax.random.key(0), scale=0.1)
