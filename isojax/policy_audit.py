"""What a policy's forward is made of: the audits of the trainer's and of the engine's function."""

from typing import Any

import jax
import jax.numpy as jnp

from isojax.audit import AuditReport, audit
from isojax.policy.batch import PackedBatch
from isojax.policy.policy import Policy


def audit_trainer(policy: Policy, tokens: int = 8) -> AuditReport:
    """Audit `policy.score` over a packed batch of `tokens`, abstractly. Raises `UncoveredArithmetic`."""
    return audit(policy.score, policy.parameter_shapes, policy.buffers, _batch(tokens), _temperature())


def audit_engine(policy: Policy, tokens: int = 8, rows: int = 8) -> AuditReport:
    """Audit what the engine runs: hidden states of `tokens`, then log-probabilities of `rows` hidden states.

    Attention is still the packed one: the engine's graph takes the paged binding in its place. Raises
    `UncoveredArithmetic`.
    """
    states = jax.ShapeDtypeStruct((rows, policy.config.hidden_size), policy.dtype)

    def step(params: Any, buffers: Any, batch: PackedBatch, states: jax.Array, temperature: jax.Array) -> Any:
        hidden = policy.hidden(params, buffers, batch.tokens, batch.positions, batch.segment_ids)
        return hidden, policy.head_rows(params, states, temperature)

    return audit(step, policy.parameter_shapes, policy.buffers, _batch(tokens), states, _temperature())


def _batch(tokens: int) -> PackedBatch:
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return PackedBatch(ids, ids, ids, ids, jax.ShapeDtypeStruct((tokens,), jnp.bool_))


def _temperature() -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), jnp.float32)
