"""The backward's own forms: a product by platform, the head a piece of the vocabulary at a time, entropy, the norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from region_samples import normal

import pallas_kernels as pk
from pallas_kernels.by_platform import by_platform
from pallas_kernels.dot import dot, dot_cpu, dot_cuda
from pallas_kernels.lm_head import vjp

EPS = 1e-5


def _relative(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")], ids=str)
@pytest.mark.parametrize("axes", [(1, 0), (0, 0), (1, 1)], ids=str)
def test_a_product_of_either_platform_is_the_product(axes, dtypes):
    rng = np.random.default_rng(0)
    shapes = [(48, 64)[:: 1 if axis else -1] for axis in axes]
    a, b = (normal(rng, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    exact = np.tensordot(np.asarray(a, np.float64), np.asarray(b, np.float64), axes=(axes[0], axes[1]))
    static = {"a_axis": axes[0], "b_axis": axes[1], "dtype": "float32"}
    assert _relative(dot_cpu(a, b, **static)[0], exact) < 1e-6
    assert _relative(dot_cuda(a, b, **static)[0], exact) < (1e-6 if dtypes[0] == dtypes[1] else 4e-3)
    rounded = dot(a, b, axes=axes, dtype=jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    assert _relative(rounded, exact) < 4e-3


def test_a_function_without_a_form_for_a_platform_is_refused():
    call = by_platform("only_here", cpu=lambda x: (x,), cuda=lambda x: (x,))
    with pytest.raises(NotImplementedError, match="only_here has no form for platform tpu"):
        jax.jit(call).trace(jnp.ones(3)).lower(lowering_platforms=("tpu",))


def _head(vocabulary=1000, tokens=24, hidden=32):
    rng = np.random.default_rng(3)
    x, w = normal(rng, (tokens, hidden), jnp.float32), normal(rng, (vocabulary + 24, hidden), jnp.float32, 0.3)
    return x, w, jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32), rng.standard_normal(tokens)


@pytest.mark.parametrize("most", [24 * 1000, 24 * 384, 24 * 128, 1])
def test_pieces_of_the_vocabulary_give_the_gradient_of_the_whole(most):
    x, w, targets, g = _head()
    temperature = jnp.float32(0.7)

    def plain(x, w, temperature):
        return jax.nn.log_softmax(x @ w[:1000].T / temperature)[jnp.arange(24), targets]

    log_probs, pull = jax.vjp(plain, x, w, temperature)
    operands = x, w, targets, temperature, log_probs, jnp.asarray(g, jnp.float32)
    *found, entropy = jax.jit(lambda *o: vjp.token_gradients(*o, vocab_size=1000, most=most))(*operands)
    for own, other in zip(found, pull(jnp.asarray(g, jnp.float32)), strict=True):
        assert _relative(own, other) < 1e-5
    rows = jax.nn.log_softmax(x @ w[:1000].T / temperature)
    assert _relative(entropy, -(jnp.exp(rows) * rows).sum(-1)) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "most"), [(16384, 151936, 2**27), (128, 1999, 2**24), (16384, 49152, 2**27), (8, 100, 1)]
)
def test_pieces_cover_the_vocabulary_and_stay_small(tokens, vocabulary, most):
    count, columns = vjp.pieces(tokens, vocabulary, most)
    assert (count - 1) * columns < vocabulary <= count * columns
    assert tokens * columns <= max(most + tokens * vjp.COLUMN_STEP, tokens * vjp.COLUMN_STEP)


def test_a_row_without_a_cotangent_gives_nothing_whatever_stands_there():
    x, w, targets, _ = _head()
    targets = targets.at[7].set(5000)

    def loss(x, w):
        log_probs = pk.token_log_probs(x, w, targets, 1.0, vocab_size=1000)
        return jnp.where(jnp.isnan(log_probs), 0, log_probs).sum()

    g_x, g_w = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert not np.asarray(g_x[7]).any()
    assert np.isfinite(np.asarray(g_x)).all()
    assert np.isfinite(np.asarray(g_w)).all()
    assert np.asarray(g_x[6]).any()


def test_a_carried_norm_with_its_gradient_is_the_norm():
    rng = np.random.default_rng(1)
    x, residual, w = (
        normal(rng, (12, 64), jnp.float32),
        normal(rng, (12, 64), jnp.float32),
        normal(rng, (64,), "float32"),
    )

    def whole(x, residual, w):
        return pk.add_rms_norm(x, residual, w, eps=EPS)

    def carried(x, residual, w):
        normed, total = pk.add_rms_norm_carried(x, residual, w, eps=EPS)
        return pk.norm_gradient(normed, total, w, eps=EPS), total

    def both(form):
        def loss(*operands):
            normed, total = form(*operands)
            return (normed * 2 + jnp.sin(normed) + total**2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, residual, w)

    (value, own), (other_value, other) = both(carried), both(whole)
    assert value == other_value
    for a, b in zip(own, other, strict=True):
        assert _relative(a, b) < 1e-6
