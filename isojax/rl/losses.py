"""The objective of every algorithm over packed tokens, finite at masked tokens whatever stands there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class LossInputs(NamedTuple):
    """What the loss needs beside the policy's own log-probabilities; every array is float32 [T], packed tokens.

    rollout_log_probs: the engine's, under which the tokens were sampled: the denominator of the ratio.
    reference_log_probs: the frozen policy's, or None without a KL term.
    advantages: of the token's completion. weights: of the token in the sum; see `token_weights`.
    mask: 1 at sampled tokens and 0 at prompt and padding. Values at masked tokens are never used.
    """

    rollout_log_probs: Array
    reference_log_probs: Array | None
    advantages: Array
    weights: Array
    mask: Array


class LossParts(NamedTuple):
    """float32 scalars, summed over a micro-batch so that micro-batches add up.

    ratio_off_one counts tokens whose ratio is not exactly 1. policy_kl*: estimates of KL(rollout || policy).
    reference_kl*: of KL(policy || reference), 0 without one. k1 and k3: see `k1_estimate` and `k3_estimate`.
    """

    tokens: Array | float
    clipped: Array | float
    ratio_off_one: Array | float
    policy_kl_k1: Array | float
    policy_kl_k3: Array | float
    reference_kl_k1: Array | float
    reference_kl_k3: Array | float


Weighting = Literal["completion_sum", "completion_mean", "token_mean"]


class Objective(NamedTuple):
    """Which objective `policy_loss` is.

    weighting: of the tokens in the sum; see `token_weights`. clip_low, clip_high: the ratio is clipped to
    [1 - clip_low, 1 + clip_high]; infinity is no clipping. kl_weight: of the k3 estimate against the reference.
    """

    weighting: Weighting
    clip_low: float = math.inf
    clip_high: float = math.inf
    kl_weight: float = 0.0


def policy_loss(log_probs: jax.Array, inputs: LossInputs, objective: Objective) -> tuple[jax.Array, LossParts]:
    """-sum_t weights_t * (min(ratio_t * A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) * A_t) - kl_weight * k3_t).

    ratio_t = exp(log_probs_t - rollout_log_probs_t). k3_t estimates KL(policy || reference). With the parameters that
    `isojax.rl.algorithms` gives it this is REINFORCE, GRPO or DAPO.

    log_probs: float32 [T], differentiable. Returns the scalar loss and its parts.
    """
    keep = inputs.mask > 0
    # Replaced before any arithmetic: masking the product instead would keep 0 * inf, in the gradient as well.
    policy = jnp.where(keep, log_probs, 0.0)
    rollout = jnp.where(keep, inputs.rollout_log_probs, 0.0)
    advantages = jnp.where(keep, inputs.advantages, 0.0)
    weights = jnp.where(keep, inputs.weights, 0.0)

    log_ratio = policy - rollout
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gain = jnp.minimum(ratio * advantages, clipped_ratio * advantages)

    reference_kl_k1 = reference_kl_k3 = jnp.zeros((), jnp.float32)
    if inputs.reference_log_probs is not None:
        reference = jnp.where(keep, inputs.reference_log_probs, 0.0)
        k3 = k3_estimate(policy, reference)
        gain = gain - objective.kl_weight * k3
        reference_kl_k1, reference_kl_k3 = jnp.sum(k1_estimate(policy, reference)), jnp.sum(k3)

    count = keep.astype(jnp.float32)
    parts = LossParts(
        tokens=jnp.sum(count),
        clipped=jnp.sum(count * (ratio != clipped_ratio)),
        ratio_off_one=jnp.sum(count * (ratio != 1.0)),
        policy_kl_k1=jnp.sum(k1_estimate(rollout, policy)),
        policy_kl_k3=jnp.sum(k3_estimate(rollout, policy)),
        reference_kl_k1=reference_kl_k1,
        reference_kl_k3=reference_kl_k3,
    )
    return -jnp.sum(weights * gain), jax.lax.stop_gradient(parts)


def k1_estimate(log_probs: jax.Array, other: jax.Array) -> jax.Array:
    """log_probs - other: estimates KL(p || other) at tokens sampled from p, unbiased and of either sign.

    J. Schulman, "Approximating KL divergence" (2020), the estimator k1.
    """
    return log_probs - other


def k3_estimate(log_probs: jax.Array, other: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = other - log_probs: estimates KL(p || other) at tokens sampled from p, never below 0.

    J. Schulman, "Approximating KL divergence" (2020), the estimator k3.
    """
    difference = other - log_probs
    return jnp.exp(difference) - difference - 1.0


def token_weights(completion_lengths: Sequence[int], weighting: Weighting) -> list[float]:
    """The weight that each token of a completion has in the sum, one a completion of a minibatch.

    "completion_sum": 1 / completions, REINFORCE's mean over completions of the sum over their tokens.
    "completion_mean": 1 / (completions * its length), GRPO's mean over completions of the mean over their tokens.
    "token_mean": 1 / all tokens, DAPO's mean over tokens: a long completion weighs more than a short one.
    """
    completions, tokens = len(completion_lengths), sum(completion_lengths)
    match weighting:
        case "completion_sum":
            return [1.0 / completions] * completions
        case "completion_mean":
            return [1.0 / (completions * length) for length in completion_lengths]
        case "token_mean":
            return [1.0 / tokens] * completions
