"""The baseline's forward: the same model without regions, near the exact one and not equal to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_samples import rows_and_gradients
from policy_samples import tiny_policy

from contracts.errors import BadConfig, PromptTooLong, UncoveredArithmetic
from isojax import completion_rows, pack
from isojax.policy import native
from isojax.policy.native import native_policy
from isojax.policy_audit import audit_trainer

pytestmark = pytest.mark.long_file(40)

ROW = 16
SEQUENCES = [[1, 2, 3, 4], [3, 4, 5, 6, 7, 8, 9, 10], [2, 9]]


@pytest.fixture(scope="module", params=["llama3_biases", "qwen3_tied"])
def pair(request):
    """A policy, the same as native, and their weights."""
    policy, params = tiny_policy(request.param)
    return policy, native_policy(policy, ROW), params


def _scores(policy, params, sequences=SEQUENCES, **padding):
    batch = pack(sequences, **policy.packing, **padding)
    values = np.asarray(policy.log_probs(params, batch, 0.7))
    return [values[completion_rows(batch, index)] for index in range(len(sequences))]


def test_it_agrees_with_the_exact_arm_as_far_as_bf16_goes_and_no_further(pair):
    exact, plain, params = pair
    assert (exact.arm, plain.arm) == ("exact", "native")
    ours, theirs = (np.concatenate(_scores(policy, params)) for policy in (exact, plain))
    assert np.any(ours != theirs)
    np.testing.assert_allclose(ours, theirs, atol=0.05)


def test_it_sees_neither_neighbours_nor_padding(pair):
    _, plain, params = pair
    together = _scores(plain, params)
    # 40 tokens are two rows and a half.
    alone = [_scores(plain, params, [sequence], length_multiple=40)[0] for sequence in SEQUENCES]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


def test_every_parameter_that_gets_a_gradient_in_the_exact_arm_gets_about_the_same(pair):
    exact, plain, params = pair

    def gradients(policy):
        _, (found, _) = rows_and_gradients(policy, params, pack(SEQUENCES, **policy.packing))
        return {name: np.asarray(value, np.float32) for name, value in found.items()}

    ours, theirs = gradients(exact), gradients(plain)
    for name, expected in ours.items():
        assert np.any(expected), name
        assert np.linalg.norm(expected - theirs[name]) < 0.1 * np.linalg.norm(expected), name


def test_the_audit_refuses_it(pair):
    exact, plain, _ = pair
    audit_trainer(exact)
    with pytest.raises(UncoveredArithmetic):
        audit_trainer(plain)


def test_sequences_that_do_not_start_a_row_are_refused(pair):
    _, plain, params = pair
    with pytest.raises(BadConfig, match=r"found sequences that start at \[0, 4, 12\]; allowed: multiples of 16"):
        plain.log_probs(params, pack(SEQUENCES))


def test_sequences_that_are_longer_than_a_row_are_refused(pair):
    _, plain, params = pair
    with pytest.raises(PromptTooLong, match=r"allowed: 0\.\.15"):
        plain.log_probs(params, pack([list(range(1, 18))], **plain.packing))


def test_blocks_of_tokens_give_the_whole_heads_values_and_sum_its_gradient_in_float32(monkeypatch):
    monkeypatch.setattr(native, "HEAD_BLOCK", 16)
    operations = native.NativeOperations(row=16, attention_by="xla")
    keys = jax.random.split(jax.random.key(0), 2)
    x_TH = jax.random.normal(keys[0], (200, 32), jnp.bfloat16)
    w_VH = jax.random.normal(keys[1], (50, 32), jnp.bfloat16)
    targets_T = jnp.arange(200, dtype=jnp.int32) % 50

    @jax.jit
    def blocks(w):
        return operations.token_log_probs(x_TH, w, targets_T, 0.7, vocab_size=50)

    @jax.jit
    def whole(w):
        rows = operations.log_prob_rows(x_TH, w, 0.7, vocab_size=50)
        return jnp.take_along_axis(rows, targets_T[:, None], axis=1)[:, 0]

    np.testing.assert_allclose(blocks(w_VH), whole(w_VH), atol=1e-4)
    found, expected = (np.asarray(jax.grad(lambda w, f=f: f(w).sum())(w_VH), np.float32) for f in (blocks, whole))
    # A sum of 13 blocks in bf16 would be off by several of its units.
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())


def test_rows_end_where_the_policys_context_does(pair):
    exact, _, _ = pair
    longer = native_policy(exact, exact.config.max_position + 64)
    assert longer.packing["start_multiple"] == exact.config.max_position
    assert dataclasses.replace(longer.config) == exact.config
