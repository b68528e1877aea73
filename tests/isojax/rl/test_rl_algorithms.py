"""Every algorithm against a small example worked out by hand: loss, gradient, weights, shaping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_samples import completion, run_config

from contracts.errors import BadConfig, EmptyBatch
from isojax.rl import LossInputs, leave_one_out_advantages, policy_loss, token_weights
from isojax.rl.overlong import overlong_penalties
from isojax.rl.packing import cut

# One group of two completions, of one and of three tokens, rewards 1 and 3.
REWARDS, LENGTHS = np.array([1.0, 3.0]), np.array([1, 3])


def algorithm(**settings_):
    return run_config(algorithm=settings_).algorithm


def by_hand(ratios, *, max_tokens=100, **settings_):
    """Loss, gradient with respect to the four log-probabilities, and parts, at the given ratios."""
    chosen = algorithm(**settings_)
    rollout = np.array([-1.0, -0.5, -2.0, -1.5], np.float32)
    advantages = chosen.advantages(REWARDS, LENGTHS, max_tokens, 2)
    weights = token_weights(LENGTHS.tolist(), chosen.objective.weighting)
    given_ = LossInputs(
        rollout,
        None,
        np.repeat(advantages, LENGTHS),
        np.repeat(np.array(weights, np.float32), LENGTHS),
        np.ones(4, np.float32),
    )
    log_probs = jnp.asarray(rollout) + jnp.log(jnp.array(ratios, jnp.float32))
    (loss, parts), gradient = jax.value_and_grad(policy_loss, has_aux=True)(log_probs, given_, chosen.objective)
    return float(loss), np.asarray(gradient), parts


def test_reinforce_is_the_reward_times_the_gradient_of_the_log_likelihood():
    # Mean over two completions of r * sum of log pi: each token's gradient is -r / 2.
    loss, gradient, _ = by_hand([1, 1, 1, 1], name="reinforce")
    np.testing.assert_allclose(gradient, [-0.5, -1.5, -1.5, -1.5], rtol=1e-6)
    assert loss == pytest.approx(-(1 * 1 + 3 * 3) / 2)


def test_reinforce_with_the_leave_one_out_baseline():
    # The other completion's reward is the baseline: advantages 1 - 3 and 3 - 1.
    loss, gradient, _ = by_hand([1, 1, 1, 1], name="reinforce", baseline="leave_one_out")
    np.testing.assert_allclose(gradient, [1, -1, -1, -1], rtol=1e-6)
    assert loss == pytest.approx(-(-2 * 1 + 2 * 3) / 2)


def test_reinforce_never_clips():
    # Far from 1 the ratio carries on: gradient -ratio * r / 2.
    loss, gradient, parts = by_hand([4, 0.25, 1, 1], name="reinforce")
    np.testing.assert_allclose(gradient, [-2, -0.375, -1.5, -1.5], rtol=1e-5)
    assert loss == pytest.approx(-(4 * 1 + 3 * 2.25) / 2, rel=1e-5)
    assert (float(parts.clipped), float(parts.ratio_off_one)) == (0, 2)


def test_grpo_means_over_tokens_within_completions_and_clips_both_sides_alike():
    # Mean 2, deviation 1: advantages -1 and 1. Weights 1/2 for the one token, 1/6 for each of the three.
    loss, gradient, parts = by_hand([0.7, 1.25, 1.1, 0.7], name="grpo")
    # min(-0.7, -0.8); min(1.25, 1.2); 1.1; min(0.7, 0.8).
    assert loss == pytest.approx(-(-0.8 / 2 + (1.2 + 1.1 + 0.7) / 6), rel=1e-5)
    np.testing.assert_allclose(gradient, [0, 0, -1.1 / 6, -0.7 / 6], rtol=1e-5, atol=1e-7)
    assert float(parts.clipped) == 3


def test_dapo_means_over_all_tokens_and_leaves_more_room_upwards():
    # Advantages -1 and 1, each token 1/4. A ratio of 1.25 is within 1.28, where GRPO had clipped it.
    loss, gradient, parts = by_hand([0.7, 1.25, 1.3, 0.7], name="dapo")
    # min(-0.7, -0.8); 1.25; min(1.3, 1.28); min(0.7, 0.8).
    assert loss == pytest.approx(-(-0.8 + 1.25 + 1.28 + 0.7) / 4, rel=1e-5)
    np.testing.assert_allclose(gradient, [0, -1.25 / 4, 0, -0.7 / 4], rtol=1e-5, atol=1e-7)
    assert float(parts.clipped) == 3


def test_dapo_takes_from_a_long_completions_reward():
    # Of 4 tokens the last half is the buffer: 3 tokens cost 1/2, and the rewards 1 and 3 become 1 and 2.5.
    chosen = algorithm(name="dapo", overlong_fraction=0.5, overlong_penalty=1.0)
    np.testing.assert_allclose(chosen.advantages(REWARDS, LENGTHS, 4, 2), [-1, 1], rtol=1e-5)
    # With a weight of 6 the penalty is 3, and the order turns round: 1 and 0.
    chosen = algorithm(name="dapo", overlong_fraction=0.5, overlong_penalty=6.0)
    np.testing.assert_allclose(chosen.advantages(REWARDS, LENGTHS, 4, 2), [1, -1], rtol=1e-5)


def test_the_overlong_penalty_at_the_papers_own_lengths():
    lengths = np.array([1, 16384, 17408, 18432, 20480])
    np.testing.assert_allclose(overlong_penalties(lengths, 20480, 0.2), [0, 0, -0.25, -0.5, -1])


def test_the_defaults_are_the_papers():
    assert algorithm(name="dapo").objective == ("token_mean", 0.2, 0.28, 0.0)
    assert algorithm(name="dapo").overlong_fraction * 20480 == 4096
    assert algorithm(name="grpo").objective == ("completion_mean", 0.2, 0.2, 0.0)
    assert algorithm().name == "grpo"
    assert algorithm(name="reinforce").objective == ("completion_sum", np.inf, np.inf, 0.0)


def test_the_leave_one_out_baseline_leaves_out_the_completion_itself():
    found = leave_one_out_advantages(np.array([0.0, 3.0, 6.0, 1.0, 1.0, 1.0]), 3)
    assert found.tolist() == [-4.5, 0, 4.5, 0, 0, 0]
    assert found.dtype == np.float32
    with pytest.raises(EmptyBatch):
        leave_one_out_advantages(np.array([]), 2)
    with pytest.raises(ValueError, match="group of one"):
        leave_one_out_advantages(np.array([1.0]), 1)


def test_token_weights_say_how_much_a_long_completion_weighs():
    def say(weighting):
        return [weight * length for weight, length in zip(token_weights([2, 6], weighting), [2, 6], strict=True)]

    assert say("completion_mean") == [0.5, 0.5]
    assert say("token_mean") == [0.25, 0.75]
    assert say("completion_sum") == [1, 3]


lengths_of_a_minibatch = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 12)), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(lengths_of_a_minibatch, st.sampled_from(["reinforce", "grpo", "dapo"]), st.sampled_from([17, 24, 64, 256]))
def test_micro_batches_change_no_weight_and_no_loss(sizes, name, capacity):
    """trl#3175 and others: a mean of micro-batches' own means is another objective."""
    completions = [completion((0,) * prompt, (1,) * tokens) for prompt, tokens in sizes]
    objective = algorithm(name=name).objective
    weights = np.array(token_weights([tokens for _, tokens in sizes], objective.weighting), np.float32)
    random = np.random.default_rng(len(sizes))
    policy, rollout, advantages = (
        [random.normal(size=tokens).astype(np.float32) for _, tokens in sizes] for _ in range(3)
    )
    spread_weights = [np.full(tokens, weight, np.float32) for (_, tokens), weight in zip(sizes, weights, strict=True)]
    ones = [np.ones_like(values) for values in policy]
    losses, back = [], [None] * len(sizes)
    for micro in cut(completions, range(len(sizes)), capacity):
        parts = [micro.spread(values) for values in (policy, rollout, advantages, spread_weights, ones)]
        loss, _ = policy_loss(jnp.asarray(parts[0]), LossInputs(parts[1], None, *parts[2:]), objective)
        losses.append(float(loss))
        micro.gather(parts[3], back)
    assert all(np.array_equal(found, wanted) for found, wanted in zip(back, spread_weights, strict=True))
    ratio = np.exp(np.concatenate(policy) - np.concatenate(rollout))
    clipped = np.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    gains = np.minimum(ratio * np.concatenate(advantages), clipped * np.concatenate(advantages))
    assert sum(losses) == pytest.approx(-float(np.sum(np.concatenate(spread_weights) * gains)), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "dapo", "clip": 0.1}, r"algorithm\.clip .* dapo does not use it; grpo would"),
        ({"name": "dapo", "kl_weight": 0.1}, "dapo does not use it; grpo would"),
        ({"name": "reinforce", "epochs": 2}, "reinforce does not use it; grpo and dapo would"),
        ({"name": "reinforce", "clip_low": 0.2}, "reinforce does not use it; dapo would"),
        ({"name": "grpo", "sampling_tries": 3}, "grpo does not use it; dapo would"),
        ({"baseline": "none"}, "grpo does not use it; reinforce would"),
        ({"name": "dapo", "clip_hi": 0.1}, "Did you mean 'clip_high'"),
        ({"name": "dapo", "clip_low": 1.5}, r"algorithm\.clip_low "),
        ({"name": "ppo"}, r"algorithm\.name .*found ppo; allowed: \['reinforce', 'grpo', 'dapo'\]"),
        ({"name": ["grpo"]}, r"algorithm\.name "),
    ],
)
def test_keys_that_an_algorithm_does_not_use_are_refused_by_name(values, says):
    with pytest.raises(BadConfig, match=says):
        run_config(algorithm=values)
