"""The trainer's gradients on a card: against plain JAX in fp32, by kernel and as a whole, and the same in every run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gradient_samples import errors, gradients, plain_gradients

from isojax import Policy
from isojax.evidence import small_policy
from isojax.kernels import packing_of
from isojax.policy.dense import REMATS
from isojax.rl.algorithms import GrpoSection
from isojax.rl.check_rollout import score
from isojax.rl.config import OptimizerSection
from isojax.rl.learner import Learner
from isojax.rl.rollout import Completion

LENGTHS = (700, 129, 64, 1, 300, 511)
TOLERANCE = 1.5
"""Of a gradient's error, as a multiple of the error of plain JAX in bf16: most of it is the rounding of activations."""


def _policy(remat):
    # The shapes of the small bundle: a process that has loaded it runs no other kernels.
    policy = Policy(small_policy.CONFIG, remat=remat)
    policy.packing = packing_of(small_policy.SHAPES)
    return policy


def _sequences(policy):
    generator = np.random.default_rng(0)
    return [generator.integers(0, policy.config.vocab_size, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("remat", REMATS)
def test_every_parameter_gets_the_gradient_of_a_plain_policy(remat):
    policy = _policy(remat)
    params = small_policy.small_parameters(policy)
    sequences = _sequences(policy)
    found, entropy_T = gradients(policy, params, sequences, with_entropy=True)
    expected = plain_gradients(policy, params, sequences)
    relative = errors(found, expected)
    usual = errors(plain_gradients(policy, params, sequences, jnp.bfloat16), expected)
    print(remat, {name: f"{error:.5f}, plain bf16 {usual[name]:.5f}" for name, error in relative.items()})
    assert all(error <= TOLERANCE * usual[name] for name, error in relative.items())
    assert 0 < float(entropy_T.min()) < float(entropy_T.max()) <= np.log(policy.config.vocab_size) + 1e-3


def test_gradients_are_the_same_in_every_run_but_for_the_embedding():
    """XLA adds the embedding's rows with atomics, in any order, unless it is told to be deterministic."""
    policy = _policy("layer")
    params = small_policy.small_parameters(policy)
    first, second = (gradients(policy, params, _sequences(policy))[0] for _ in range(2))
    for name in first.keys() - {"embed"}:
        np.testing.assert_array_equal(np.asarray(first[name]), np.asarray(second[name]), err_msg=name)


@pytest.mark.parametrize(("H", "K", "D"), [(16, 8, 128), (6, 2, 64), (4, 1, 128), (3, 3, 64)])
@pytest.mark.parametrize("lengths", [(512,) * 4, (2048,), (100, 1, 64, 1500, 8, 129)], ids=str)
def test_attentions_backward_on_a_card(lengths, H, K, D):
    from pallas_kernels.attention.hopper_backward import hopper_gradients
    from pallas_kernels.attention.vjp import chunked_gradients

    T, scale, at = 2048, D**-0.5, 0
    positions, segments = np.zeros(T, np.int32), np.full(T, -1, np.int32)
    for number, length in enumerate(lengths):
        positions[at : at + length], segments[at : at + length] = np.arange(length), number
        at += -(-length // 8) * 8
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(T, H, D), (T, K, D), (T, K, D), (T, H, D)]
    q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    place = jnp.asarray(positions), jnp.asarray(segments)
    out = jax.jit(partial(_attention, scale))(q, k, v, *place)
    operands = q, k, v, *place, out, g
    found, again = (jax.jit(partial(hopper_gradients, scale=scale))(*operands) for _ in range(2))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(chunked_gradients, scale=scale))(*operands)
    for own, second, other in zip(found, again, expected, strict=True):
        own, second, other = (np.asarray(array, np.float64) for array in (own, second, other))
        assert np.linalg.norm(own - other) <= 1e-2 * np.linalg.norm(other)
        np.testing.assert_array_equal(own, second)
        assert not own[segments < 0].any()


def test_an_update_learns_from_its_own_scores_and_rounds_the_new_weights():
    """The whole learner: ratios of exactly 1, weights that move, and copies rounded to nearest even."""
    policy = _policy("layer")
    params = small_policy.small_parameters(policy)
    capacity = max(small_policy.SHAPES.trainer_tokens)
    learner = Learner(
        policy,
        params,
        optimizer=OptimizerSection(learning_rate=1e-3),
        algorithm=GrpoSection(),
        temperature=1.0,
        micro_batch_tokens=capacity,
    )
    sequences = [sequence for sequence in _sequences(policy) if len(sequence) > 8]
    blank = [
        Completion(number, tuple(own[:8]), tuple(own[8:]), np.zeros(len(own) - 8, np.float32), "length", "")
        for number, own in enumerate(sequences)
    ]
    scores = score(policy, learner.params, blank, 1.0, capacity)
    completions = [replace(own, log_probs=found) for own, found in zip(blank, scores, strict=True)]
    advantages = np.linspace(-1, 1, len(completions), dtype=np.float32)
    result = learner.update(completions, advantages, None, require_exact=True)
    assert (result.updates, result.first_ratio_off_one, len(result.mismatch.wrong)) == (1, 0, 0)
    assert np.isfinite(result.loss)
    assert result.gradient_norm > 0
    for name, master in learner.state.master.items():
        rounded = np.asarray(master).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(learner.params[name]).view(np.uint16), rounded.view(np.uint16), name)
    assert not np.array_equal(np.asarray(learner.params["layers.down"]), np.asarray(params["layers.down"]))


def _attention(scale, q, k, v, positions, segments):
    wide = [array.astype(jnp.float32) for array in (q, *(jnp.repeat(a, q.shape[1] // k.shape[1], 1) for a in (k, v)))]
    scores = jnp.einsum("thd,shd->hts", *wide[:2], precision="highest") * scale
    rows = jnp.arange(len(q))
    visible = (rows[:, None] >= rows) & (rows >= (rows - positions)[:, None])
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    out = jnp.einsum("hts,shd->thd", weights, wide[2], precision="highest")
    return jnp.where((segments >= 0)[:, None, None], out, 0).astype(q.dtype)
