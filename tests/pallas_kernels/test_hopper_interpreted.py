"""The real kernel sources, run in Pallas's GPU interpreter with race detection on small shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.sealing, pytest.mark.slow]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _run(program, *operands, races=True):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        return program.run(*operands)


def _close(found, expected, tolerance=1e-2):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(("T", "leaves"), [(8, 4), (72, 4)])
def test_matmul(T, leaves):
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_large import LargeTile
    from pallas_kernels.matmul.hopper_small import SmallTile

    x, w, bias = _normal(0, T, 512), _normal(1, 128, 512), _normal(2, 128)
    tile = SmallTile(depth=64, stages=3) if T == 8 else LargeTile(stages=3)
    (out,) = _run(matmul_program(T, 128, 512, leaves=leaves, bias=True, tile=tile), x, w, bias)
    _close(out, x.astype(jnp.float32) @ w.astype(jnp.float32).T + bias.astype(jnp.float32))


@pytest.mark.parametrize("H", [256, 576])
def test_add_rms_norm(H):
    from pallas_kernels.rms_norm.hopper import add_rms_norm_program

    x, residual, w = _normal(0, 2, H), _normal(1, 2, H), _normal(2, H)
    normed, total = _run(add_rms_norm_program(2, H, eps=1e-6), x, residual, w)
    assert bool((total == x + residual).all())
    wide = (x + residual).astype(jnp.float32)
    _close(normed, wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * w.astype(jnp.float32))


def test_swiglu():
    from pallas_kernels.swiglu.hopper import swiglu_program

    gate_up = _normal(0, 2, 512)
    wide = gate_up.astype(jnp.float32)
    _close(_run(swiglu_program(2, 256), gate_up)[0], jax.nn.silu(wide[:, :256]) * wide[:, 256:])


def test_rotated_keys_and_values_go_to_their_rows_of_the_cache():
    from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program, qk_norm_rope_program

    T, N, K, D, page = 8, 2, 1, 64, 16
    qkv, weights = _normal(0, T, (N + 2 * K) * D), (_normal(1, D), _normal(2, D))
    angles = jax.random.uniform(jax.random.key(3), (T, D // 2)) * 9
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)
    q, k, v = _run(qk_norm_rope_program(T, N, K, D, norm=True, eps=1e-6), qkv, table, *weights)
    assert bool((v[:, 0] == qkv[:, 3 * D :]).all())
    slots = jnp.array([5, -1, 17, 40, 0, 2, 31, 16], jnp.int32)
    caches = [jnp.zeros((3, page, K, D), jnp.bfloat16)] * 2
    program = paged_qk_norm_rope_program(T, N, K, D, pages=3, page=page, norm=True, eps=1e-6)
    found = _run(program, qkv, table, slots, *caches, *weights)
    assert bool((found[0] == q).all())
    for cache, rows in zip(found[1:], (k, v), strict=True):
        assert bool((cache.reshape(-1, K, D)[slots[slots >= 0]] == rows[slots >= 0]).all())


def test_attention_of_two_packed_sequences():
    from pallas_kernels.attention.hopper import attention_program

    lengths, T, D = (40, 29), 72, 64
    positions, segments = np.zeros(T, np.int32), np.full(T, -1, np.int32)
    for number, (first, length) in enumerate(zip((0, 40), lengths, strict=True)):
        positions[first : first + length] = np.arange(length)
        segments[first : first + length] = number
    q, k, v = _normal(0, T, 2, D), _normal(1, T, 1, D), _normal(2, T, 1, D)
    program = attention_program(T, 2, 1, D, scale=0.125, split=256, staged_weights=True)
    layer = jnp.int32(0)
    (out,) = _run(program, q, k, v, jnp.asarray(positions), jnp.asarray(segments), layer, races=False)
    for first, length in zip((0, 40), lengths, strict=True):
        rows = slice(first, first + length)
        scores = jnp.einsum("nhd,ld->hnl", q[rows].astype(jnp.float32), k[rows, 0].astype(jnp.float32)) / 8
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        _close(out[rows], jnp.einsum("hnl,ld->nhd", jax.nn.softmax(scores), v[rows, 0].astype(jnp.float32)), 2e-2)
    assert bool((out[69:] == 0).all())


def test_log_prob_rows_of_an_odd_vocabulary():
    from pallas_kernels.lm_head.hopper import log_prob_rows_program

    x, w = _normal(0, 8, 64), _normal(1, 384, 64)
    (out,) = _run(log_prob_rows_program(8, 64, 384, vocab_size=333), x, w, jnp.float32(1.3), races=False)
    logits = (x.astype(jnp.float32) @ w.astype(jnp.float32).T)[:, :333]
    _close(out, jax.nn.log_softmax(logits / 1.3), 1e-5)
