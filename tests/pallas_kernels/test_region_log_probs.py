"""Full rows and single targets are one computation; temperature, padding and broken logits are handled as declared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from region_samples import normal

import pallas_kernels as pk
from pallas_kernels.lm_head import cpu, vjp


def head(vocabulary, rows=None, tokens=18, hidden=64, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    x, w = normal(rng, (tokens, hidden), dtype), normal(rng, (rows or vocabulary, hidden), dtype, 0.3)
    return x, w, jnp.asarray(rng.integers(0, vocabulary, tokens), jnp.int32)


@pytest.mark.parametrize("tokens", [1, 16, 70])
@pytest.mark.parametrize("vocabulary", [5, 130, 5000])
def test_single_targets_are_elements_of_the_full_rows(tokens, vocabulary):
    x, w, targets = head(vocabulary, tokens=tokens)
    rows = np.asarray(pk.log_prob_rows(x, w, 0.9, vocab_size=vocabulary))
    chosen = pk.token_log_probs(x, w, targets, 0.9, vocab_size=vocabulary)
    assert rows.shape == (tokens, vocabulary)
    assert reference.unequal(chosen, rows[np.arange(tokens), np.asarray(targets)]) == 0


@pytest.mark.parametrize(("vocabulary", "padded"), [(49_159, 49_216), (151_936, 152_064)])
def test_rows_of_padding_count_as_minus_infinity(vocabulary, padded):
    # RL-Kernel#329: one side padded its vocabulary.
    x, w, _ = head(vocabulary, rows=padded, tokens=2, hidden=32)
    result = pk.log_prob_rows(x, w, 1.0, vocab_size=vocabulary)
    assert reference.unequal(result, pk.log_prob_rows(x, w[:vocabulary], 1.0, vocab_size=vocabulary)) == 0
    poisoned = w.at[vocabulary:].set(jnp.nan)
    assert reference.unequal(result, pk.log_prob_rows(x, poisoned, 1.0, vocab_size=vocabulary)) == 0
    # Taking the padding for words moves every row.
    assert reference.unequal(result, np.asarray(pk.log_prob_rows(x, w, 1.0, vocab_size=padded))[:, :vocabulary]) > 0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_temperature_divides_the_logits(temperature):
    # trl#4159, prime-rl#697.
    x, w, _ = head(300, dtype=jnp.float32)
    result = np.asarray(pk.log_prob_rows(x, w, temperature, vocab_size=300))
    assert reference.unequal(result, reference.log_prob_rows(x, w, temperature, vocab_size=300)) == 0
    logits = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T / temperature
    exact = (
        logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1)[:, None]
    )
    assert np.abs(result - exact).max() < 1e-5
    wrong = np.asarray(pk.log_prob_rows(x, w, 1.0, vocab_size=300)) / np.float32(temperature)
    assert (reference.unequal(result, wrong) == 0) == (temperature == 1.0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_logit_shows_in_its_whole_row_and_no_other(broken):
    x, w, targets = head(200)
    x = x.at[3].set(broken)
    rows = np.asarray(pk.log_prob_rows(x, w, 1.0, vocab_size=200))
    chosen = np.asarray(pk.token_log_probs(x, w, targets, 1.0, vocab_size=200))
    assert np.isnan(rows[3]).all()
    assert np.isnan(chosen[3])
    assert np.isfinite(np.delete(rows, 3, 0)).all()
    assert np.isfinite(np.delete(chosen, 3)).all()


def test_a_target_outside_the_vocabulary_is_nan():
    x, w, targets = head(200, rows=256)
    chosen = np.asarray(pk.token_log_probs(x, w, targets.at[0].set(200).at[1].set(-1), 1.0, vocab_size=200))
    assert np.isnan(chosen[:2]).all()
    assert np.isfinite(chosen[2:]).all()


def test_subtracting_the_sum_of_maximum_and_logarithm_is_caught():
    x, w, _ = head(300)
    scaled = reference.chain(reference.wide(x), reference.wide(w))
    other = scaled - np.asarray(jax.nn.logsumexp(jnp.asarray(scaled), axis=1))[:, None]
    assert reference.unequal(pk.log_prob_rows(x, w, 1.0, vocab_size=300), other) > 0


def largest_array(jaxpr):
    """Elements of the largest intermediate array anywhere in a jaxpr."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [var.aval.size for var in equation.outvars if hasattr(var.aval, "size")]
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    sizes.append(largest_array(inner))
    return max(sizes)


def test_single_targets_and_their_gradient_hold_only_a_chunk_of_logits():
    x, w, targets = head(4096, tokens=2000, hidden=8)

    def form(x, w):
        return cpu.token_log_probs(x, w, targets, jnp.float32(1.0), vocab_size=4096)[0]

    def gradient(x, w):
        rows = jnp.zeros(2000)
        return vjp.token_gradients(x, w, targets, jnp.float32(1), rows, rows, vocab_size=4096, most=2**20)

    assert largest_array(jax.make_jaxpr(form)(x, w).jaxpr) <= max(cpu.ROW_TILES) * 4096
    assert largest_array(jax.make_jaxpr(gradient)(x, w).jaxpr) <= 2**20
    # The walk does see a [T, V] array.
    plain = jax.make_jaxpr(lambda x, w: jax.nn.log_softmax(x @ w.T)[:, 0])(x, w)
    assert largest_array(plain.jaxpr) == 2000 * 4096
