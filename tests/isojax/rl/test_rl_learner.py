"""The update alone: gradients, minibatches, master weights, and what it refuses to apply."""

import numpy as np
import pytest
from reference_engine import one_bit_off
from rl_samples import leaf_bits, run_config, small_engine, small_params, small_policy

from contracts.errors import DifferenceFound, NonFiniteLogits
from isojax.rl.advantages import group_advantages
from isojax.rl.learner import Learner
from isojax.rl.rollout import Sampling


def small_learner(**algorithm):
    config = run_config(algorithm=algorithm)
    return Learner(
        small_policy(),
        small_params(),
        optimizer=config.optimizer,
        algorithm=config.algorithm,
        temperature=1.0,
        micro_batch_tokens=64,
    )


@pytest.fixture(scope="module")
def rollout():
    engine = small_engine()
    engine.sync(small_params())
    return engine.generate([[0, 1], [0, 2]], Sampling(max_tokens=3, samples=4, seed=5))


def test_the_ratio_is_asserted_in_the_learner_itself(rollout):
    wrong = [one_bit_off(rollout[0], 1), *rollout[1:]]
    learner = small_learner()
    with pytest.raises(DifferenceFound, match="ratio of the first minibatch"):
        learner.update(wrong, np.ones(8, np.float32), None, require_exact=True)
    assert leaf_bits(learner.params) == leaf_bits(small_params())


def test_minibatches_and_epochs_are_updates_of_their_own_and_later_ratios_move(rollout):
    learner = small_learner(minibatches=2, epochs=2)
    advantages = group_advantages(np.arange(8.0), 4)
    result = learner.update(rollout, advantages, None, require_exact=True)
    assert result.updates == 4
    assert (result.first_ratio_off_one, result.first_clip_fraction) == (0, 0)
    assert result.policy_kl.k3 > 0
    # trainer_fwd is compared where no weight had moved yet: the first minibatch, one prompt's group.
    assert result.mismatch.tokens == 12


def test_gradients_of_micro_batches_add_up(rollout):
    """Sixteen completions fill two micro-batches; each half alone weighs its tokens twice as much."""
    advantages = group_advantages(np.arange(16.0), 4)
    learner = small_learner()
    both = learner._minibatch([*rollout, *rollout], list(range(16)), advantages, None)
    halves = [learner._minibatch(rollout, list(range(8)), part, None) for part in np.split(advantages, 2)]
    assert both.parts.tokens == sum(half.parts.tokens for half in halves) == 48
    for name, gradient in both.gradients.items():
        expected = (np.asarray(halves[0].gradients[name]) + np.asarray(halves[1].gradients[name])) / 2
        # The micro-batches are cut elsewhere, and each one's gradient is a bfloat16 value: eight bits of mantissa.
        np.testing.assert_allclose(gradient, expected, atol=float(np.abs(expected).max()) * 2**-6, err_msg=name)


def test_every_parameter_receives_a_gradient(rollout):
    part = small_learner()._minibatch(rollout, list(range(8)), group_advantages(np.arange(8.0), 4), None)
    assert {name for name, value in part.gradients.items() if np.abs(value).max() > 0} == set(small_params())


def test_master_weights_keep_what_bfloat16_would_lose(rollout):
    learner = small_learner()
    learner._optimizer = learner._optimizer.model_copy(update={"learning_rate": 1e-6})
    master = leaf_bits(learner.state.master)
    for _ in range(2):
        learner.update(rollout, group_advantages(np.arange(8.0), 4), None, require_exact=False)
    assert leaf_bits(learner.state.master) != master
    # 1e-6 is far below a bfloat16 ulp of most weights, so nearly all copies still round to where they were.
    unchanged = [
        np.mean(np.asarray(learner.params[name]) == np.asarray(value)) for name, value in small_params().items()
    ]
    assert min(unchanged) > 0.9
    assert all(value.dtype == np.float32 for value in learner.state.master.values())


def test_an_update_that_is_not_finite_is_refused_and_not_applied(rollout):
    learner = small_learner()
    with pytest.raises(NonFiniteLogits, match="loss"):
        learner.update(rollout, np.full(8, np.nan, np.float32), None, require_exact=True)
    assert leaf_bits(learner.params) == leaf_bits(small_params())
