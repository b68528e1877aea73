"""A forward as one writes it without regions, on padded sequences: what exact parity is compared with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from isojax.policy import Policy, PolicyConfig
from isojax.policy.batch import PackedBatch
from isojax.policy.native import native_policy
from isojax.policy.policy import Parameters

# B: sequences, S: tokens of a sequence, D: head dimension, P: positions of the rope table.


@partial(jax.jit, static_argnums=0)
def plain_log_probs(config: PolicyConfig, params: Parameters, rope_PD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """fp32 [B, S - 1]: log-probability of every token but the first, at temperature 1.

    params: a policy's packed parameters, whose dtype is that of all activations. tokens: int32, padded on the right
    with any token, whose own values are then meaningless. The native arm's arithmetic: see `NativeOperations`.
    """
    sequences, length = tokens_BS.shape
    policy = native_policy(Policy(config, dtype=str(params["embed"].dtype)), length)
    batch = PackedBatch(
        tokens=tokens_BS.reshape(-1),
        positions=jnp.tile(jnp.arange(length), sequences),
        segment_ids=jnp.repeat(jnp.arange(sequences), length),
        targets=jnp.roll(tokens_BS, -1, axis=1).reshape(-1),
        mask=jnp.ones(tokens_BS.size, bool),
    )
    log_probs_T = policy.score(params, {"rope_table": rope_PD}, batch)
    return log_probs_T.reshape(sequences, length)[:, :-1]
