"""Advantages and the loss of every algorithm against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import EmptyBatch
from isojax.rl import LossInputs, Objective, group_advantages, policy_loss
from isojax.rl.losses import k3_estimate

GRPO = Objective("completion_mean", 0.2, 0.2)


def inputs(rollout, advantages, *, mask=None, weights=None, reference=None) -> LossInputs:
    count = len(rollout)
    return LossInputs(
        rollout_log_probs=np.array(rollout, np.float32),
        reference_log_probs=None if reference is None else np.array(reference, np.float32),
        advantages=np.array(advantages, np.float32),
        weights=np.array(weights or [1 / count] * count, np.float32),
        mask=np.array(mask or [1] * count, np.float32),
    )


def test_advantages_are_the_groups_standard_scores():
    # Group (0, 1): mean 0.5, population deviation 0.5. Group (1, 3): mean 2, deviation 1.
    found = group_advantages(np.array([0.0, 1.0, 1.0, 3.0]), 2)
    np.testing.assert_allclose(found, [-1, 1, -1, 1], rtol=1e-5)
    assert found.dtype == np.float32


def test_groups_do_not_mix():
    assert group_advantages(np.array([0.0, 0.0, 5.0, 5.0]), 2).tolist() == [0, 0, 0, 0]


@given(st.floats(-1e3, 1e3), st.integers(2, 16))
def test_equal_rewards_give_no_gradient_however_the_mean_rounds(reward, size):
    assert np.abs(group_advantages(np.full(size, reward), size)).max() < 1e-4


def test_no_rewards_and_half_a_group_are_refused():
    with pytest.raises(EmptyBatch):
        group_advantages(np.array([]), 2)
    with pytest.raises(ValueError, match="groups of 2"):
        group_advantages(np.array([1.0, 2.0, 3.0]), 2)


def test_at_ratio_one_the_gradient_is_that_of_the_advantage_weighted_log_likelihood():
    log_probs = jnp.array([-1.0, -2.0, -0.5])
    given = inputs(log_probs, [2.0, -1.0, 0.5])
    (loss, parts), gradient = jax.value_and_grad(policy_loss, has_aux=True)(log_probs, given, GRPO)
    np.testing.assert_allclose(loss, -(2.0 - 1.0 + 0.5) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, -np.array([2.0, -1.0, 0.5]) / 3, rtol=1e-6)
    assert (float(parts.ratio_off_one), float(parts.clipped), float(parts.tokens)) == (0, 0, 3)


def test_clipping_stops_the_gradient_only_on_the_side_that_would_go_further():
    # Ratios 1.5 and 0.5 with a clip of 0.2, each with both signs of the advantage.
    log_probs = jnp.log(jnp.array([1.5, 1.5, 0.5, 0.5], jnp.float32))
    given = inputs([0.0] * 4, [1.0, -1.0, 1.0, -1.0], weights=[1.0] * 4)
    (loss, parts), gradient = jax.value_and_grad(policy_loss, has_aux=True)(log_probs, given, GRPO)
    # min(1.5, 1.2), min(-1.5, -1.2), min(0.5, 0.8), min(-0.5, -0.8).
    np.testing.assert_allclose(loss, -(1.2 - 1.5 + 0.5 - 0.8), rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 1.5, -0.5, 0.0], atol=1e-6)
    assert float(parts.clipped) == 4


def test_a_ratio_of_exactly_one_needs_equal_bits():
    rollout = np.array([-1.2345678, -0.7], np.float32)
    moved = rollout.copy()
    moved.view(np.int32)[1] += 4
    _, same = policy_loss(jnp.asarray(rollout), inputs(rollout, [1, 1]), GRPO)
    _, other = policy_loss(jnp.asarray(moved), inputs(rollout, [1, 1]), GRPO)
    assert (float(same.ratio_off_one), float(other.ratio_off_one)) == (0, 1)


def test_the_kl_term_is_schulmans_k3_and_pulls_towards_the_reference():
    policy, reference = jnp.array([-1.0]), [-1.5]
    given = inputs(policy, [0.0], reference=reference)
    objective = GRPO._replace(kl_weight=0.5)
    (loss, parts), gradient = jax.value_and_grad(policy_loss, has_aux=True)(policy, given, objective)
    k3 = np.exp(-0.5) + 0.5 - 1
    np.testing.assert_allclose(loss, 0.5 * k3, rtol=1e-5)
    np.testing.assert_allclose((parts.reference_kl_k1, parts.reference_kl_k3), (0.5, k3), rtol=1e-5)
    # d k3 / d policy = 1 - exp(reference - policy): positive, so descent lowers a too likely token.
    np.testing.assert_allclose(gradient, [0.5 * (1 - np.exp(-0.5))], rtol=1e-5)


def test_k3_is_never_negative():
    one, other = np.random.default_rng(0).uniform(-20, 0, (2, 1000)).astype(np.float32)
    assert float(k3_estimate(one, other).min()) >= 0
    assert float(k3_estimate(one, one).max()) == 0


@pytest.mark.parametrize("poison", [(-1.0, -100.0), (-100.0, -1.0), (np.nan, 0.0), (-np.inf, np.inf), (0.0, -np.inf)])
def test_masked_tokens_never_reach_the_loss_or_its_gradient(poison):
    """prime-rl#2084: exp(-1 - -100) overflows, and 0 * inf is NaN if the mask is multiplied in afterwards."""
    masked, rollout = poison

    def loss_of(values, given):
        return policy_loss(values, given, GRPO._replace(kl_weight=0.1))[0]

    given = inputs([-1.0, rollout], [1.0, np.inf], mask=[1, 0], weights=[1.0, np.nan], reference=[-1.0, rollout])
    loss, gradient = jax.value_and_grad(loss_of)(jnp.array([-1.0, masked], jnp.float32), given)
    alone = loss_of(jnp.array([-1.0]), inputs([-1.0], [1.0], weights=[1.0], reference=[-1.0]))
    assert float(loss) == float(alone)
    assert np.isfinite(gradient).all()
    assert gradient[1] == 0


def test_multiplying_the_mask_in_afterwards_is_the_fault_that_the_test_above_would_catch():
    def wrong(values):
        ratio = jnp.exp(values - jnp.array([-1.0, -100.0]))
        return jnp.sum(ratio * jnp.array([1.0, 0.0]))

    assert not np.isfinite(jax.grad(wrong)(jnp.array([-1.0, -1.0]))).all()
