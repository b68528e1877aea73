"""Every operand's gradient against a plain JAX form in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from region_samples import normal

import pallas_kernels as pk

EPS = 1e-5


def rms(x, w):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * w


def rotate(x, table):
    cos, sin = (half[:, None] for half in jnp.split(table, 2, -1))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def turn(qkv, norm_q, norm_k):
    q, k, v = jnp.split(qkv.reshape(12, 8, 64), (4, 6), axis=1)
    return rotate(norm_q(q), TABLE), rotate(norm_k(k), TABLE), v


def plain_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    score = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, group, 1)) * 0.125
    segment = jnp.asarray(SEGMENTS)
    seen = (segment[:, None] == segment[None]) & (jnp.arange(12)[:, None] >= jnp.arange(12)[None])
    score = jnp.where(seen | jnp.eye(12, dtype=bool), score, -jnp.inf)
    out = jnp.einsum("hts,shd->thd", jax.nn.softmax(score, -1), jnp.repeat(v, group, 1))
    return jnp.where((segment >= 0)[:, None, None], out, 0)


POSITIONS = np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], np.int32)
SEGMENTS = np.array([0] * 5 + [1] * 5 + [-1, -1], np.int32)
TARGETS = np.array([3, 0, 99, 7, 8, 9, 1, 2, 50, 60, 70, 98], np.int32)
ANGLES = np.random.default_rng(9).uniform(0, 6, (12, 32))
TABLE = jnp.asarray(np.concatenate([np.cos(ANGLES), np.sin(ANGLES)], 1), jnp.float32)

X, W, HEADS, KEYS, QKV = (12, 64), (128, 64), (12, 4, 64), (12, 2, 64), (12, 8 * 64)
FORMS = {
    "matmul": (lambda x, w, b: pk.matmul(x, w, b, leaves=2), lambda x, w, b: x @ w.T + b, (X, W, (128,))),
    "rms_norm": (lambda x, w: pk.rms_norm(x, w, eps=EPS), rms, (X, (64,))),
    "add_rms_norm": (
        lambda x, r, w: pk.add_rms_norm(x, r, w, eps=EPS),
        lambda x, r, w: (rms(x + r, w), x + r),
        (X, X, (64,)),
    ),
    "residual_add": (pk.residual_add, lambda x, r: x + r, (X, X)),
    "swiglu": (pk.swiglu, lambda x: jax.nn.silu(x[:, :32]) * x[:, 32:], (X,)),
    "gated_matmul": (
        pk.gated_matmul,
        lambda x, w: jax.nn.silu(x @ w[:64].T) * (x @ w[64:].T),
        (X, W),
    ),
    "rope": (
        lambda qkv: pk.qk_norm_rope(qkv, TABLE, key_heads=2, eps=EPS),
        lambda qkv: turn(qkv, lambda q: q, lambda k: k),
        (QKV,),
    ),
    "qk_norm_rope": (
        lambda qkv, a, b: pk.qk_norm_rope(qkv, TABLE, a, b, key_heads=2, eps=EPS),
        lambda qkv, a, b: turn(qkv, lambda q: rms(q, a), lambda k: rms(k, b)),
        (QKV, (64,), (64,)),
    ),
    "cast": (lambda x: pk.cast(x, dtype="float32"), lambda x: x, (X,)),
    "attention": (
        lambda q, k, v: pk.attention(q, k, v, jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS), 0, scale=0.125),
        plain_attention,
        (HEADS, KEYS, KEYS),
    ),
    "log_prob_rows": (
        lambda x, w, t: pk.log_prob_rows(x, w, t, vocab_size=100),
        lambda x, w, t: jax.nn.log_softmax(x @ w[:100].T / t),
        (X, W, ()),
    ),
    "token_log_probs": (
        lambda x, w, t: pk.token_log_probs(x, w, jnp.asarray(TARGETS), t, vocab_size=100),
        lambda x, w, t: jax.nn.log_softmax(x @ w[:100].T / t)[jnp.arange(12), TARGETS],
        (X, W, ()),
    ),
}


def gradients(form, operands, seed=1):
    """Gradients of a random weighted sum of all results."""

    def loss(*operands):
        results = jax.tree.leaves(form(*operands))
        rng = np.random.default_rng(seed)
        return sum((r.astype(jnp.float32) * rng.standard_normal(r.shape).astype(np.float32)).sum() for r in results)

    return jax.jit(jax.grad(loss, tuple(range(len(operands)))))(*operands)


def operands_of(shapes, dtype):
    rng = np.random.default_rng(0)
    return [jnp.float32(0.8) if shape == () else normal(rng, shape, dtype, 0.5) for shape in shapes]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_of_every_operand_equal_plain_jax(name, dtype):
    region, plain, shapes = FORMS[name]
    operands = operands_of(shapes, dtype)
    found = gradients(region, operands)
    expected = gradients(plain, [operand.astype(jnp.float32) for operand in operands])
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    for own, other, operand in zip(found, expected, operands, strict=True):
        assert own.dtype == operand.dtype
        assert own.shape == operand.shape
        assert np.abs(np.asarray(other)).max() > 0
        error = np.abs(np.asarray(own, np.float32) - np.asarray(other)).max()
        assert error <= tolerance * np.abs(np.asarray(other)).max()


def test_a_wrong_backward_is_caught():
    region, _, shapes = FORMS["swiglu"]
    operands = operands_of(shapes, jnp.float32)
    wrong = gradients(lambda x: jax.nn.sigmoid(x[:, :32]) * x[:, 32:], operands)
    (own,) = gradients(region, operands)
    assert np.abs(np.asarray(own) - np.asarray(wrong[0])).max() > 0.1


def test_padding_rows_get_no_gradient_from_other_segments():
    operands = operands_of((HEADS, KEYS, KEYS), jnp.float32)
    form = FORMS["attention"][0]
    _, _, g_v = jax.grad(lambda q, k, v: form(q, k, v)[:10].sum(), (0, 1, 2))(*operands)
    assert not np.asarray(g_v[10:]).any()


def test_no_rows_have_no_gradient_but_a_zero_one_for_weights():
    w = jnp.ones((128, 64))
    gradient = jax.grad(lambda w: pk.token_log_probs(jnp.zeros((0, 64)), w, TARGETS[:0], 1.0, vocab_size=100).sum())(w)
    assert gradient.shape == w.shape
    assert not np.asarray(gradient).any()
