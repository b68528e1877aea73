"""The GRPO objective over packed tokens, finite at masked tokens whatever stands there."""

from __future__ import annotations

from typing import NamedTuple

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

    ratio_off_one counts tokens whose ratio is not exactly 1.
    """

    tokens: Array | float
    clipped: Array | float
    ratio_off_one: Array | float
    policy_kl: Array | float
    reference_kl: Array | float
    weighted_reference_kl: Array | float


def grpo_loss(
    log_probs: jax.Array, inputs: LossInputs, *, clip: float, kl_weight: float
) -> tuple[jax.Array, LossParts]:
    """-sum_t weights_t * (min(ratio_t * A_t, clip(ratio_t, 1 - clip, 1 + clip) * A_t) - kl_weight * k3_t).

    ratio_t = exp(log_probs_t - rollout_log_probs_t); k3_t = exp(d) - d - 1 with d = reference - policy, the unbiased,
    non-negative estimate of KL(policy || reference). DeepSeekMath (arXiv 2402.03300), equations 3 and 4; with
    `token_weights` the sum is the paper's mean over completions of the mean over their tokens.

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
    clipped_ratio = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
    objective = jnp.minimum(ratio * advantages, clipped_ratio * advantages)

    zero = jnp.zeros((), jnp.float32)
    reference_kl = weighted_reference_kl = zero
    if inputs.reference_log_probs is not None:
        k3 = k3_estimate(policy, jnp.where(keep, inputs.reference_log_probs, 0.0))
        objective = objective - kl_weight * k3
        reference_kl, weighted_reference_kl = jnp.sum(k3), jnp.sum(weights * k3)

    count = keep.astype(jnp.float32)
    parts = LossParts(
        tokens=jnp.sum(count),
        clipped=jnp.sum(count * (ratio != clipped_ratio)),
        ratio_off_one=jnp.sum(count * (ratio != 1.0)),
        policy_kl=jnp.sum(k3_estimate(rollout, policy)),
        reference_kl=reference_kl,
        weighted_reference_kl=weighted_reference_kl,
    )
    return -jnp.sum(weights * objective), jax.lax.stop_gradient(parts)


def k3_estimate(log_probs: jax.Array, other: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = other - log_probs: estimates KL(p || other) at tokens sampled from p, never below 0.

    J. Schulman, "Approximating KL divergence" (2020), the estimator k3.
    """
    difference = other - log_probs
    return jnp.exp(difference) - difference - 1.0


def token_weights(completion_lengths: list[int]) -> list[float]:
    """The weight of each completion's tokens in the sum: 1 / (completions * its length), GRPO's mean of means."""
    return [1.0 / (len(completion_lengths) * length) for length in completion_lengths]
