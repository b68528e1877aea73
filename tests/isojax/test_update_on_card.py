"""Everything that an update runs is lowered for a card, and the trainer's cast there rounds as its CPU form does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_samples import sealable_params, sealable_policy

from isojax.policy.batch import PackedBatch
from isojax.rl.config import OptimizerSection
from isojax.rl.learner import _accumulate_gradients, _apply_gradients, _global_norm, _start
from isojax.rl.losses import LossInputs, Objective
from isojax.weights.digest import _lanes
from pallas_kernels.cast import cpu, cuda

T = 256
OPTIMIZER = OptimizerSection(learning_rate=1e-4)


@pytest.mark.sealing
def test_an_update_is_lowered_for_a_card():
    policy, params = sealable_policy(), sealable_params()

    def lowered(function, *arguments, **static):
        return function.trace(*arguments, **static).lower(lowering_platforms=("cuda",)).as_text()

    state = jax.eval_shape(lambda params: _start(params, optimizer=OPTIMIZER, policy=policy), params)
    lowered(_start, params, optimizer=OPTIMIZER, policy=policy)
    gradients = {name: jax.ShapeDtypeStruct(value.shape, jnp.float32) for name, value in params.items()}
    ids, floats = jnp.zeros(T, jnp.int32), jnp.zeros(T, jnp.float32)
    batch, inputs = PackedBatch(*[ids] * 4, jnp.zeros(T, bool)), LossInputs(*[floats] * 5)
    heat = jnp.float32(1.0)
    text = lowered(
        _accumulate_gradients,
        *(params, gradients, policy.buffers, batch, inputs, heat),
        policy=policy,
        objective=Objective("token_mean"),
    )
    assert "mosaic_gpu" in text
    # Rounded by definition; a conversion alone might be removed beside its opposite.
    assert "reduce_precision" in lowered(_apply_gradients, state, gradients, optimizer=OPTIMIZER, policy=policy)
    lowered(_global_norm, gradients)
    for value in params.values():
        lowered(_lanes, value, np.uint32(7))


def test_the_cast_of_a_card_has_the_bits_of_the_cast_of_a_cpu():
    generator = np.random.default_rng(0)
    exponents = np.arange(256, dtype=np.uint32) << 23
    # Midpoints of neighbouring bfloat16 values and one to either side, in every binade, subnormals and both signs.
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x18001, 0x7F8000, 0x7FFFFF], np.uint32)
    words = (exponents[:, None] + tails).reshape(-1)
    words = np.concatenate([words, words | 0x80000000, generator.integers(0, 2**32, 4096, dtype=np.uint32)])
    values = words.view(np.float32)
    values = values[~np.isnan(values)]
    expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    for form in (cpu.cast, cuda.cast):
        (found,) = jax.jit(form, static_argnames="dtype")(values, dtype="bfloat16")
        assert np.array_equal(np.asarray(found).view(np.uint16), expected), form.__module__
        (nan,) = jax.jit(form, static_argnames="dtype")(np.array([np.nan, -np.nan], np.float32), dtype="bfloat16")
        assert bool(jnp.isnan(nan).all())
        (back,) = jax.jit(form, static_argnames="dtype")(found, dtype="float32")
        assert np.array_equal(np.asarray(back).view(np.uint32) >> 16, expected)


def test_a_pair_of_casts_still_rounds():
    values = np.random.default_rng(1).normal(size=4096).astype(np.float32)

    def twice(x):
        return cuda.cast(cuda.cast(x, dtype="bfloat16")[0], dtype="float32")[0]

    found = np.asarray(jax.jit(twice)(values))
    assert np.array_equal(found, values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not np.array_equal(found, values)
