"""The gated matmul is the regions matmul and swiglu one after the other, with and without gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from region_samples import normal

import pallas_kernels as pk
from isojax.jaxprs import closed_jaxprs


def _operands(tokens, dtype, columns=128):
    rng = np.random.default_rng(tokens)
    return normal(rng, (tokens, 192), dtype), normal(rng, (columns, 192), dtype, 0.1)


def _two_regions(x, w):
    return pk.swiglu(pk.matmul(x, w, leaves=1))


def _differentiated(x, w):
    return jax.vjp(pk.gated_matmul, x, w)[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 65, 300])
def test_it_has_the_bits_of_its_two_regions(tokens, dtype):
    operands = _operands(tokens, dtype)
    expected = jax.jit(_two_regions)(*operands)
    for form in (pk.gated_matmul, _differentiated):
        assert reference.unequal(jax.jit(form)(*operands), expected) == 0


def test_a_skipped_round_between_the_two_is_seen():
    x, w = _operands(65, jnp.bfloat16)

    def without_the_round(x, w):
        return pk.cast(pk.swiglu(pk.matmul(x, w, leaves=1, out_dtype="float32")), dtype="bfloat16")

    assert reference.unequal(jax.jit(without_the_round)(x, w), pk.gated_matmul(x, w)) > 0


def test_wider_weights_have_the_same_bits():
    x, w = _operands(20, jnp.bfloat16)
    wide = w.astype(jnp.float32)
    for form in (pk.gated_matmul, _differentiated):
        assert reference.unequal(form(x, wide), form(x, w)) == 0


def test_under_gradients_the_two_regions_run_and_each_of_them_once():
    x, w = _operands(8, jnp.bfloat16)

    def regions(function):
        found = []

        def walk(jaxpr):
            for equation in jaxpr.eqns:
                if pk.is_region(equation.primitive):
                    found.append(pk.region_of(equation.primitive).name)
                for part in closed_jaxprs(equation):
                    walk(part)

        walk(jax.make_jaxpr(function)(x, w).jaxpr)
        return found

    assert regions(pk.gated_matmul) == ["gated_matmul"]
    gradient = jax.grad(lambda x, w: pk.gated_matmul(x, w).astype(jnp.float32).sum(), (0, 1))
    assert regions(gradient) == ["matmul", "swiglu"]
