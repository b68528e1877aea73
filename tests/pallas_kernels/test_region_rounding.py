"""Rounding is to nearest even everywhere; signed zeros, subnormals, infinities and NaN come out as declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference

import pallas_kernels as pk
from pallas_kernels import rounding


def around_every_bfloat16(step):
    """fp32 at, just below and just above the midpoint above every `step`-th bfloat16, in both signs."""
    upper = np.arange(0, 2**16, step, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper[:, None] | lower).view(np.float32)


def test_cast_rounds_every_kind_of_float_to_nearest_even():
    x = around_every_bfloat16(1)
    finite = np.isfinite(x)
    midpoint = (x.view(np.uint32) & 0xFFFF) == 0x8000
    subnormal = (np.abs(x) < 2.0**-126) & (x != 0)
    assert midpoint[finite].sum() > 60_000
    assert subnormal.sum() > 1000
    result = np.asarray(pk.cast(jnp.asarray(x), dtype="bfloat16"))
    assert (reference.bits(result)[finite] == reference.bits(x[finite].astype(reference.BF16))).all()
    assert np.isnan(result.astype(np.float32)[np.isnan(x)]).all()
    assert (result.astype(np.float32)[np.isinf(x)] == x[np.isinf(x)]).all()
    truncated = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert (reference.bits(result)[finite] != truncated[finite]).sum() > 100_000


def test_cast_to_fp32_keeps_every_bit():
    x = np.arange(2**16, dtype=np.uint16).reshape(256, 256).view(reference.BF16)
    result = reference.bits(pk.cast(jnp.asarray(x), dtype="float32"))
    assert (result == x.view(np.uint16).astype(np.uint32) << 16).all()


def test_a_cast_there_and_back_is_not_removed():
    x = jnp.asarray(around_every_bfloat16(97))
    back = jax.jit(lambda x: pk.cast(pk.cast(x, dtype="bfloat16"), dtype="float32"))(x)
    assert reference.unequal(back, x) > 1000


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_seventy_two_signed_residual_adds_take_exact_midpoints_to_even(sign):
    # aiter#5151: truncation leaves a bias over 72 layers. Every sum here is an exact midpoint.
    x = sign * jnp.asarray(1 + np.arange(128) / 128, jnp.bfloat16)[None].repeat(16, 0)
    half_step = jnp.full_like(x, sign * 2.0**-8)
    sums = reference.wide(x) + reference.wide(half_step)
    assert ((sums.view(np.uint32) & 0xFFFF) == 0x8000).all()
    stream, expected, truncated = x, np.asarray(x), np.asarray(x)
    for _ in range(72):
        stream = pk.residual_add(stream, half_step)
        expected = reference.add(expected, half_step)
        wide = reference.wide(truncated) + reference.wide(half_step)
        truncated = (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(reference.BF16)
    assert reference.unequal(stream, expected) == 0
    assert reference.unequal(stream, truncated) > 0


def test_norms_of_midpoints_equal_the_reference_in_both_signs():
    rng = np.random.default_rng(0)
    # Rows of +-c have a root mean square of c exactly, so x * inverse is +-1 and the weight's product is the weight.
    signs = rng.choice([-1.0, 1.0], (16, 192))
    x = jnp.asarray(signs * 2.0 ** rng.integers(-3, 4, (16, 1)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal(192), jnp.bfloat16)
    for eps in (0.0, 1e-5):
        result = pk.rms_norm(x, w, eps=eps)
        assert reference.unequal(result, reference.rms_norm(x, w, eps=eps)) == 0
    assert reference.unequal(pk.rms_norm(x, w, eps=0.0), jnp.asarray(signs, jnp.bfloat16) * w) == 0


def test_signed_zeros_follow_ieee():
    zeros = jnp.asarray([[0.0, -0.0, 0.0, -0.0]], jnp.float32)
    others = jnp.asarray([[0.0, -0.0, -0.0, 0.0]], jnp.float32)
    assert reference.unequal(pk.residual_add(zeros, others), np.float32([[0.0, -0.0, 0.0, 0.0]])) == 0
    assert reference.unequal(pk.cast(zeros, dtype="bfloat16"), np.asarray(zeros).astype(reference.BF16)) == 0
    gate_up = jnp.asarray([[-0.0, 0.0, -0.0, 1.0, 1.0, -1.0]], jnp.float32)
    assert reference.unequal(pk.swiglu(gate_up), np.float32([[-0.0, 0.0, 0.0]])) == 0


def test_arithmetic_takes_subnormals_for_zero_in_every_region_alike():
    tiny = np.float32(1e-39)
    x = jnp.full((16, 64), tiny)
    assert not np.asarray(pk.residual_add(x, x)).any()
    assert not np.asarray(pk.matmul(x, jnp.ones((64, 64)))).any()
    # Only arithmetic does: a cast moves words.
    assert np.asarray(pk.cast(x, dtype="bfloat16")).astype(np.float32).all()
    plain = jax.jit(lambda x: x + x)(x)
    assert not np.asarray(plain).any()


def test_lanes_are_the_declared_order_and_the_plain_sum_is_another():
    x = np.random.default_rng(1).standard_normal((16, 1765)).astype(np.float32)
    assert reference.unequal(jax.jit(rounding.row_sum)(x), reference.row_sum(x)) == 0
    assert reference.unequal(jax.jit(lambda x: jnp.sum(x, 1))(x), reference.row_sum(x)) > 0


@pytest.mark.parametrize("position", [0, 1, 4095, 4097, 40_000, 131_071])
def test_rope_is_right_far_behind_position_4096(position):
    # A table in bfloat16 is off by whole radians there.
    head, theta = 64, 10_000.0
    inverse = theta ** (-np.arange(0, head, 2, dtype=np.float64) / head)
    angle = position * inverse
    table = np.concatenate([np.cos(angle), np.sin(angle)]).astype(np.float32)[None]
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, heads, head)).astype(np.float32) for heads in (3, 1, 1))

    def exact(x, cos, sin):
        a, b = np.split(x.astype(np.float64), 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    qkv = jnp.asarray(np.concatenate([q, k, v], axis=1).reshape(1, -1))
    *rotated, values = pk.qk_norm_rope(qkv, jnp.asarray(table), key_heads=1, eps=1e-6)
    assert np.array_equal(values, v)
    for result, x in zip(rotated, (q, k), strict=True):
        assert np.abs(np.asarray(result) - exact(x, np.cos(angle), np.sin(angle))).max() < 1e-6
        rough = np.float64(np.float32(position).astype(reference.BF16)) * inverse.astype(reference.BF16).astype(float)
        error = np.abs(np.asarray(result) - exact(x, np.cos(rough), np.sin(rough))).max()
        assert error > 0.1 or position < 2
