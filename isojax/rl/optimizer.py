"""AdamW on float32 master weights, and the copies in the policy's dtype that everything else computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from isojax.rl.config import OptimizerSection

if TYPE_CHECKING:
    from isojax.policy.policy import Policy

Parameters = dict[str, jax.Array]


class LearnerState(NamedTuple):
    """What an update changes: float32 master weights by flat name, and the optimizer's moments and counters."""

    master: Parameters
    optimizer: optax.OptState


def build_optimizer(settings: OptimizerSection) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a linear warm-up.

    Norms and biases do not decay.
    """
    rate = settings.learning_rate
    if settings.warmup_updates:
        # The first update already moves: it has 1 / warmup_updates of the rate.
        rate = optax.linear_schedule(rate / settings.warmup_updates, rate, settings.warmup_updates - 1)
    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm),
        optax.adamw(
            rate,
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=_decays,
        ),
    )


def start_state(optimizer: optax.GradientTransformation, params: Mapping[str, jax.Array]) -> LearnerState:
    """Master weights widened from `params` (exact) and a fresh optimizer, its moments cut as `params` are."""
    master = {name: jnp.array(value, jnp.float32, copy=True) for name, value in params.items()}
    return LearnerState(master, optimizer.init(master))


def compute_copies(master: Mapping[str, jax.Array], policy: Policy) -> Parameters:
    """The master weights in the policy's dtype, rounded to nearest even by its cast region; pure and traceable.

    On a mesh every device casts its own pieces.
    """

    def copies(pieces: Parameters) -> Parameters:
        if policy.dtype == "float32":
            return {name: jnp.copy(value) for name, value in pieces.items()}
        return {name: policy.operations.cast(value, dtype=policy.dtype) for name, value in pieces.items()}

    return policy.placement.by_piece(copies)(dict(master))


def _decays(params: Mapping[str, jax.Array]) -> dict[str, bool]:
    return {name: not ("norm" in name or "bias" in name) for name in params}
