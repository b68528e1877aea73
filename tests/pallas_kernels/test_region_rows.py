"""A row's bits depend on nothing but the row: not on the number of rows, its place, or what its neighbours hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from region_samples import BY_NAME, SAMPLES, operands

import pallas_kernels as pk

COUNTS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65)
FEW_COUNTS = (1, 16, 33)
THOROUGH = ("matmul", "rms_norm")
ROWS = 80


def take(rows, index):
    return tuple(row[index] for row in rows)


def differing(call, sample, dtype, counts):
    """For each count of rows, how many elements differ from the same rows of the whole batch."""
    rows, shared = operands(sample, ROWS, dtype)
    whole = call(rows, shared)
    found = {}
    for count in counts:
        part = call(take(rows, slice(count)), shared)
        found[count] = sum(reference.unequal(a, np.asarray(b)[:count]) for a, b in zip(part, whole, strict=True))
    return found


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_rows_do_not_depend_on_their_number(sample):
    counts = COUNTS if sample.name in THOROUGH else FEW_COUNTS
    assert set(differing(sample.call, sample, jnp.bfloat16, counts).values()) == {0}


def test_a_dot_and_a_sum_left_to_xla_are_caught():
    def plain_matmul(rows, shared):
        return (rows[0].astype(jnp.float32) @ shared[0].astype(jnp.float32).T,)

    def plain_sum(rows, shared):
        return (jnp.sum(rows[0].astype(jnp.float32), axis=1),)

    # One row takes another kernel; few rows are summed as a tree, many are not.
    assert differing(jax.jit(plain_matmul), BY_NAME["matmul"], jnp.float32, (1,))[1] > 0
    assert differing(jax.jit(plain_sum), BY_NAME["rms_norm"], jnp.float32, (1, 4))[1] > 0


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_rows_do_not_depend_on_their_place_or_neighbours(sample):
    rows, shared = operands(sample, ROWS, jnp.bfloat16)
    call = sample.call
    whole = call(rows, shared)
    order = np.random.default_rng(1).permutation(ROWS)
    moved = call(take(rows, order), shared)
    for a, b in zip(moved, whole, strict=True):
        assert reference.unequal(a, np.asarray(b)[order]) == 0
    kept = np.arange(ROWS) % 3 == 0
    poisoned = tuple(
        jnp.where(kept.reshape(-1, *[1] * (row.ndim - 1)), row, jnp.nan) if row.dtype != jnp.int32 else row
        for row in rows
    )
    for a, b in zip(call(poisoned, shared), whole, strict=True):
        assert reference.unequal(np.asarray(a)[kept], np.asarray(b)[kept]) == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_equal_rows_give_equal_results(sample):
    rows, shared = operands(sample, 1, jnp.bfloat16)
    repeated = tuple(jnp.repeat(row, 16, axis=0) for row in rows)
    for result in sample.call(repeated, shared):
        result = reference.bits(result)
        assert (result == result[:1]).all()


@pytest.mark.parametrize("width", [1765, 64, 5])
def test_norm_and_softmax_of_equal_rows_at_odd_widths(width):
    rng = np.random.default_rng(4)
    x = jnp.repeat(jnp.asarray(rng.standard_normal((1, width)), jnp.float32), 16, axis=0)
    normed = reference.bits(pk.rms_norm(x, jnp.ones(width), eps=1e-6))
    w = jnp.asarray(rng.standard_normal((width, width)), jnp.float32)
    log_probs = reference.bits(pk.log_prob_rows(x, w, 1.0, vocab_size=width))
    alone = reference.bits(pk.log_prob_rows(x[:1], w, 1.0, vocab_size=width))
    assert (normed == normed[:1]).all()
    assert (log_probs == alone).all()
