"""A region's bits do not depend on the program around it: neighbours, constants, scan, remat, vmap, grad."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from jax import lax
from region_samples import BY_NAME, SAMPLES, normal, operands

import pallas_kernels as pk

pytestmark = pytest.mark.long_file(40)

TOKENS = 16


def alone(sample, rows, shared):
    """The region by itself: an eager call compiles nothing but the region."""
    return sample.call(rows, shared)


def assert_equal(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert reference.unequal(a, b) == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_multiply_and_add_before_and_after_do_not_fuse_with_a_region(sample):
    rows, shared = operands(sample, TOKENS, jnp.float32)

    def before(rows):
        return tuple(row * 1.37 + 0.11 if row.dtype != jnp.int32 else row for row in rows)

    def after(results):
        return tuple(result * 1.73 + 0.29 for result in results)

    together = jax.jit(lambda rows, shared: after(sample.call(before(rows), shared)))(rows, shared)
    prepared = jax.jit(before)(rows)
    assert_equal(together, jax.jit(after)(alone(sample, prepared, shared)))


def test_plain_jax_in_place_of_a_region_fuses_with_its_neighbour():
    rows, _ = operands(BY_NAME["residual_add"], TOKENS, jnp.float32)

    def changed(add):
        together = jax.jit(lambda a, b: add(a * 1.37, b))(*rows)
        return reference.unequal(together, jax.jit(add)(jax.jit(lambda a: a * 1.37)(rows[0]), rows[1]))

    assert changed(lambda a, b: a + b) > 0
    assert changed(pk.residual_add) == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_operands_known_at_compile_time_change_nothing(sample):
    rows, shared = operands(sample, TOKENS, jnp.bfloat16)
    constants = jax.jit(lambda first: sample.call((first, *rows[1:]), shared))(rows[0])
    assert_equal(constants, alone(sample, rows, shared))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_a_constant_temperature_is_still_a_division(temperature):
    (x,), (w,) = operands(BY_NAME["log_prob_rows"], TOKENS, jnp.float32)
    constant = jax.jit(lambda x, w: pk.log_prob_rows(x, w, temperature, vocab_size=1000))(x, w)
    operand = jax.jit(lambda x, w, t: pk.log_prob_rows(x, w, t, vocab_size=1000))(x, w, jnp.float32(temperature))
    assert reference.unequal(constant, operand) == 0
    assert reference.unequal(constant, reference.log_prob_rows(x, w, temperature, vocab_size=1000)) == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_scan_vmap_remat_and_grad_give_the_bits_of_the_region_alone(sample):
    members = [operands(sample, TOKENS, jnp.bfloat16, seed) for seed in (0, 1)]
    shared = members[0][1]
    expected = [alone(sample, rows, shared) for rows, _ in members]
    stacked = tuple(jnp.stack(pair) for pair in zip(*(rows for rows, _ in members), strict=True))

    def scanned(rows):
        return lax.scan(lambda _, own: (None, sample.call(own, shared)), None, rows)[1]

    def mapped(rows):
        return jax.vmap(lambda own: sample.call(own, shared))(rows)

    def under_grad(rows):
        # The first row operand is a float in every region; integers are not differentiated.
        def loss(first):
            results = jax.checkpoint(sample.call)((first, *rows[1:]), shared)
            return sum(result.astype(jnp.float32).sum() for result in results), results

        return jax.grad(loss, has_aux=True)(rows[0])[1]

    in_scan, in_map, in_grad = jax.jit(lambda rows, one: (scanned(rows), mapped(rows), under_grad(one)))(
        stacked, members[0][0]
    )
    for several in (in_scan, in_map):
        for member, own in enumerate(expected):
            assert_equal(tuple(result[member] for result in several), own)
    assert_equal(in_grad, expected[0])


def test_a_chain_of_regions_equals_its_steps():
    (x,), (w,) = operands(BY_NAME["matmul"], TOKENS, jnp.bfloat16)
    norm = normal(np.random.default_rng(5), (w.shape[0],), jnp.bfloat16)

    def chain(x, w, norm):
        y = pk.matmul(x, w)
        normed, total = pk.add_rms_norm(y, y, norm, eps=1e-5)
        return pk.residual_add(pk.swiglu(jnp.concatenate([normed, total], 1)), y)

    assert reference.unequal(jax.jit(chain)(x, w, norm), chain(x, w, norm)) == 0
