"""The sm90 kernels of attention's backward: interpreted on small shapes, and lowered for a card without one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_samples import normal
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.attention.vjp import chunked_gradients

pytestmark = [pytest.mark.sealing, pytest.mark.slow, pytest.mark.long_file(40)]


def _packed(lengths, T, gap=0):
    """Positions and segments of sequences with `gap` rows of padding behind each, and padding at the end."""
    positions, segments, at = np.zeros(T, np.int32), np.full(T, -1, np.int32), 0
    for number, length in enumerate(lengths):
        positions[at : at + length], segments[at : at + length] = np.arange(length), number
        at += length + gap
    return jnp.asarray(positions), jnp.asarray(segments)


def _attention(segments, scale, q, k, v):
    """fp32 causal attention inside of each segment; zeros for padding."""
    group, T = q.shape[1] // k.shape[1], len(q)
    scores = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, group, 1)) * scale
    visible = (segments[:, None] == segments[None]) & (jnp.arange(T)[:, None] >= jnp.arange(T))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    out = jnp.einsum("hts,shd->thd", weights, jnp.repeat(v, group, 1))
    return jnp.where((segments >= 0)[:, None, None], out, 0)


def _case(lengths, T, H, K, D, gap=0):
    positions, segments = _packed(lengths, T, gap)
    q, k, v, g = normal(0, T, H, D), normal(1, T, K, D), normal(2, T, K, D), normal(3, T, H, D)
    out, gradients = _attention_and_gradients(segments, D**-0.5, q, k, v, g)
    return (q, k, v, positions, segments, out, g), gradients


@partial(jax.jit, static_argnums=1)
def _attention_and_gradients(segments, scale, q, k, v, g):
    """One compilation; op by op there were forty."""
    wide = [array.astype(jnp.float32) for array in (q, k, v)]
    out, pull = jax.vjp(partial(_attention, segments, scale), *wide)
    return out.astype(jnp.bfloat16), pull(g.astype(jnp.float32))


def _interpreted(*operands, scale):
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from pallas_kernels.attention.hopper_backward import hopper_gradients

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        found = jax.block_until_ready(hopper_gradients(*operands, scale=scale, staged_weights=True))
    assert not get_races().races_found, "see RACE DETECTED in the output"
    return found


def _relative(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


CASES = {
    "short sequences, gaps, one over a tile's edge": ((40, 80, 56, 1), 256, 2, 1, 64, 8),
    "one sequence longer than a tile, all heads their own": ((300,), 384, 2, 2, 64),
    "four heads share a key head of 128": ((100, 28), 128, 4, 1, 128),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_packed_attention(case):
    operands, expected = _case(*CASES[case])
    scale = operands[0].shape[-1] ** -0.5
    for found in (_interpreted(*operands, scale=scale), chunked_gradients(*operands, scale=scale)):
        for own, other in zip(found, expected, strict=True):
            assert own.dtype == jnp.bfloat16
            assert _relative(own, other) < 1e-2


def test_padding_gets_no_gradient():
    operands, _ = _case((40, 50), 128, 2, 1, 64, 8)
    padding = np.asarray(operands[4]) < 0
    for own in _interpreted(*operands, scale=0.125):
        assert not np.asarray(own, np.float32)[padding].any()


def test_shapes_without_a_kernel_are_refused():
    from pallas_kernels.attention.hopper_backward import hopper_gradients

    operands, _ = _case((40,), 136, 2, 1, 64)
    with pytest.raises(NotImplementedError, match=r"tokens in steps of 128; got bfloat16, 64 and 136"):
        hopper_gradients(*operands, scale=0.125)


def _lower_for_card(function, *operands):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("T", "H", "K", "D"), [(16384, 16, 8, 128), (8192, 32, 8, 128), (2048, 9, 3, 64)])
def test_the_kernels_lower_at_the_sizes_that_are_trained(T, H, K, D):
    from pallas_kernels.attention.hopper_backward import hopper_gradients

    def of(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    query, key, number = of(T, H, D), of(T, K, D), of(T, dtype=jnp.int32)
    operands = (query, key, key, number, number, query, query)
    text = _lower_for_card(partial(hopper_gradients, scale=0.1), *operands)
    assert text.count("@mosaic_gpu_v2") == 2
    assert f"{T}x{T}x" not in text


def test_a_policys_backward_lowers_for_a_card_with_no_wide_copies():
    """Its products keep bf16 operands, its attention is the kernels, and no array has all logits or all scores."""
    from isojax import PackedBatch, Policy
    from isojax.evidence import small_policy

    T = 2048
    policy = Policy(small_policy.CONFIG)
    number = jax.ShapeDtypeStruct((T,), jnp.int32)
    batch = PackedBatch(number, number, number, number, jax.ShapeDtypeStruct((T,), jnp.bool_))

    def gradients(params, batch):
        return jax.grad(lambda params: policy.score(params, policy.buffers, batch, 1.0).sum())(params)

    text = _lower_for_card(gradients, policy.parameter_shapes, batch)
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    # Two a product of a layer, three of the head.
    assert len(products) >= 11
    assert all(line.split(" : ")[-1].count("bf16") >= 2 for line in products), products
    assert f"{T}x{T}x" not in text
