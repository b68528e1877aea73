"""The policy's gradients against plain JAX in fp32, under every remat policy and with the products of each platform."""

from collections import Counter
from functools import cache

import jax
import numpy as np
import pytest
from gradient_samples import errors, gradients, plain_gradients
from policy_samples import FAMILIES, random_sequences, tiny_policy

from isojax import Policy, pack
from isojax.policy.dense import REMATS
from pallas_kernels import by_platform

pytestmark = pytest.mark.long_file(130)

LENGTHS = (9, 24, 13)
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
"""Of a gradient's error, relative to its norm. bf16 activations alone differ from fp32 ones by a few in a thousand."""


def _with_remat(policy, remat):
    return Policy(policy.config, dtype=policy.dtype, remat=remat)


@cache
def _own(family, dtype):
    """The policy's gradients of the sequences below, compiled once for all tests that plant nothing."""
    found, _ = gradients(*tiny_policy(family, dtype), random_sequences(*LENGTHS))
    return found


@cache
def _expected(family, dtype):
    """The same of a plain policy, which no planted fault reaches: it has no regions."""
    return plain_gradients(*tiny_policy(family, dtype), random_sequences(*LENGTHS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_the_gradient_of_a_plain_policy(family, dtype):
    relative = errors(_own(family, dtype), _expected(family, dtype))
    assert max(relative.values()) <= TOLERANCE[dtype], relative


def test_a_missing_norm_gradient_is_caught(monkeypatch):
    import pallas_kernels

    monkeypatch.setattr(pallas_kernels, "norm_gradient", lambda normed, total, w, *, eps: normed)
    found, _ = gradients(*tiny_policy("qwen3", "float32"), random_sequences(*LENGTHS))
    assert errors(found, _expected("qwen3", "float32"))["norms"] > 0.1


@pytest.mark.parametrize("remat", REMATS)
def test_the_products_of_a_card_give_the_same_gradients(remat, monkeypatch):
    """bf16 operands, sums in fp32: the form that CUDA gets, run on this machine."""
    calls = Counter()
    for name, kind in (("backward_dot", "product"), ("token_log_probs_backward", "head")):

        def counted(*operands, form=by_platform.FORMS[name]["cuda"], kind=kind, **static):
            calls[kind] += 1
            return form(*operands, **static)

        monkeypatch.setitem(by_platform.FORMS[name], "cpu", counted)
    policy, params = tiny_policy("qwen3_tied", "bfloat16")
    found, _ = gradients(_with_remat(policy, remat), params, random_sequences(*LENGTHS))
    relative = errors(found, _expected("qwen3_tied", "bfloat16"))
    assert max(relative.values()) <= TOLERANCE["bfloat16"], relative
    assert calls["product"] >= 3
    assert calls["head"] == 1


def regions_in(jaxpr, counts):
    """Sites of every region in a jaxpr, a scan's body once."""
    for equation in jaxpr.eqns:
        counts[equation.primitive.name.removeprefix("isojax_")] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    regions_in(inner, counts)
    return counts


@pytest.mark.parametrize(
    ("remat", "products", "attentions"),
    # Four products a layer forward. Computed again are all but the last, whose result no backward needs.
    [("none", 4, 1), ("layer", 7, 2), ("regions", 4, 1)],
)
def test_remat_computes_again_what_it_says(remat, products, attentions):
    policy, params = tiny_policy("qwen3", "bfloat16")
    policy = _with_remat(policy, remat)
    batch = pack(random_sequences(*LENGTHS))

    def loss(params):
        return policy.score(params, policy.buffers, batch, 1.0).sum()

    counts = regions_in(jax.make_jaxpr(jax.grad(loss))(params).jaxpr, Counter())
    assert counts["matmul"] == products
    assert counts["attention"] == attentions
    assert counts["token_log_probs"] == 1


def test_the_probe_gives_every_rows_entropy_and_moves_no_gradient():
    policy, params = tiny_policy("qwen3", "float32")
    sequences = random_sequences(*LENGTHS)
    batch = pack(sequences)
    probed, entropy_T = gradients(policy, params, sequences, with_entropy=True)
    rows = np.asarray(policy.log_prob_rows(params, batch, np.arange(len(batch.tokens))), np.float64)
    np.testing.assert_allclose(entropy_T, -(np.exp(rows) * rows).sum(-1), rtol=1e-5)
    for name, value in _own("qwen3", "float32").items():
        np.testing.assert_array_equal(value, probed[name])
