"""Every region equals its declared rounding schedule, bit for bit, in both dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from region_samples import SAMPLES, normal, operands

import pallas_kernels as pk

DTYPES = (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_region_equals_its_declared_schedule(sample, dtype):
    rows, shared = operands(sample, 19, dtype)
    results = jax.jit(sample.call)(rows, shared)
    for result, expected in zip(results, sample.reference(rows, shared), strict=True):
        assert reference.unequal(result, expected) == 0


@pytest.mark.parametrize(("columns", "depth", "leaves"), [(960, 576, 1), (576, 1536, 4), (72, 2048, 8), (1, 64, 1)])
@pytest.mark.parametrize("tokens", [3, 40, 90])
def test_matmul_is_one_chain_a_leaf_whatever_the_tile(columns, depth, leaves, tokens):
    rng = np.random.default_rng(1)
    x, w = normal(rng, (tokens, depth), jnp.bfloat16), normal(rng, (columns, depth), jnp.bfloat16)
    picked = np.unique(np.r_[0, columns // 2, columns - 1])
    rows = np.array([0, tokens - 1])
    expected = reference.matmul(x[rows], w[picked], leaves=leaves, dtype=np.float32)
    result = pk.matmul(x, w, leaves=leaves, out_dtype=jnp.float32)
    assert reference.unequal(np.asarray(result)[rows][:, picked], expected) == 0


def test_another_order_along_the_depth_is_caught():
    rng = np.random.default_rng(2)
    x, w = normal(rng, (4, 576), jnp.float32), normal(rng, (64, 576), jnp.float32)
    result = pk.matmul(x, w, leaves=4)
    assert reference.unequal(result, reference.matmul(x, w, leaves=4)) == 0
    assert reference.unequal(result, reference.matmul(x, w, leaves=2)) > 100
    backwards = reference.chain(np.asarray(x)[:, ::-1], np.asarray(w)[:, ::-1])
    assert reference.unequal(pk.matmul(x, w), backwards) > 100


@pytest.mark.parametrize("leaves", [1, 4])
def test_weights_stored_wider_give_the_same_bits(leaves):
    rng = np.random.default_rng(3)
    x, w, bias = (normal(rng, shape, jnp.bfloat16) for shape in ((20, 256), (100, 256), (100,)))
    stored = pk.matmul(x, w, bias, leaves=leaves)
    widened = pk.matmul(x, w.astype(jnp.float32), bias.astype(jnp.float32), leaves=leaves)
    assert stored.dtype == widened.dtype == jnp.bfloat16
    assert reference.unequal(stored, widened) == 0
    rows = pk.log_prob_rows(x, w, 1.0, vocab_size=100)
    assert reference.unequal(rows, pk.log_prob_rows(x, w.astype(jnp.float32), 1.0, vocab_size=100)) == 0


def test_bias_comes_after_the_round_of_the_sum():
    # 256 + 1 rounds to 256 in bfloat16; adding the bias 1 before the round would give 258.
    x = jnp.ones((1, 2), jnp.bfloat16)
    w = jnp.asarray([[256.0, 1.0]], jnp.bfloat16)
    assert float(pk.matmul(x, w)[0, 0]) == 256.0
    assert float(pk.matmul(x, w, jnp.ones(1, jnp.bfloat16))[0, 0]) == 256.0
    assert float(256.0 + 1.0 + 1.0) == 258.0
