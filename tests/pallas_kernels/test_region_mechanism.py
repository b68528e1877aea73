"""The mechanism: declarations, primitives, errors, symbolic token counts, platforms, counters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from region_samples import BY_NAME, SAMPLES, operands

import pallas_kernels as pk
from contracts.errors import UnknownCase
from pallas_kernels import counters
from pallas_kernels.region import Spec

X, W = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)


def test_the_dense_family_is_declared():
    assert set(pk.REGIONS) >= {
        "matmul",
        "gated_matmul",
        "rms_norm",
        "add_rms_norm",
        "residual_add",
        "paged_qk_norm_rope",
        "qk_norm_rope",
        "swiglu",
        "attention",
        "paged_attention",
        "paged_decode_attention",
        "log_prob_rows",
        "token_log_probs",
        "cast",
    }
    for name, region in pk.REGIONS.items():
        assert region.name == name
        assert isinstance(region.spec, Spec)
        assert region.spec.rounding
        assert region.spec.hazards
        assert set(region.spec.cases) <= set(counters.CASES)


@pytest.mark.parametrize("updates", [("q",), ("k_cache",), ("k_cache", "elsewhere")])
def test_updates_must_be_the_last_results_and_operands_too(updates):
    declared = pk.REGIONS["paged_qk_norm_rope"]
    with pytest.raises(ValueError, match="not its last results and operands too"):
        dataclasses.replace(declared, name="of_a_test", updates=updates)
    assert "of_a_test" not in pk.REGIONS


def test_a_call_is_one_primitive_that_knows_its_region():
    jaxpr = jax.make_jaxpr(lambda x, w: pk.REGIONS["matmul"].bind(x, w, leaves=2, out_dtype="float32"))(X, W)
    (equation,) = jaxpr.eqns
    assert pk.is_region(equation.primitive)
    assert pk.region_of(equation.primitive) is pk.REGIONS["matmul"]
    assert equation.params == {"leaves": 2, "out_dtype": "float32"}
    assert not pk.is_region(jax.lax.add_p)
    with pytest.raises(KeyError):
        pk.region_of(jax.lax.add_p)


def test_a_name_can_be_declared_once():
    matmul = pk.REGIONS["matmul"]
    fields = ("name", "operands", "parameters", "results", "shape_rule", "cpu", "spec")
    with pytest.raises(ValueError, match="declared twice"):
        pk.Region(**{field: getattr(matmul, field) for field in fields})


def test_wrong_counts_and_parameters_are_type_errors():
    matmul = pk.REGIONS["matmul"]
    with pytest.raises(TypeError, match="operands x, w, bias"):
        matmul.bind(X, leaves=1, out_dtype="float32")
    with pytest.raises(TypeError, match="parameters"):
        matmul.bind(X, W, leaves=1)
    with pytest.raises(TypeError, match="leaves must be int; got bool"):
        matmul.bind(X, W, leaves=True, out_dtype="float32")


@pytest.mark.parametrize(
    "call",
    [
        lambda: pk.matmul(X, W.T),
        lambda: pk.matmul(X, W, leaves=3),
        lambda: pk.matmul(X, W, jnp.ones(31)),
        lambda: pk.matmul(X.astype(jnp.float16), W),
        lambda: pk.rms_norm(X, W[0, :3], eps=1e-5),
        lambda: pk.residual_add(X, X.astype(jnp.float32)),
        lambda: pk.swiglu(X[:, :3]),
        lambda: pk.gated_matmul(X, W[:31]),
        lambda: pk.gated_matmul(X, W[:, :32]),
        lambda: pk.cast(X, dtype="float16"),
        lambda: pk.qk_norm_rope(jnp.ones((3, 192)), jnp.ones((3, 64), jnp.bfloat16), key_heads=1, eps=1e-5),
        lambda: pk.qk_norm_rope(jnp.ones((3, 192)), jnp.ones((3, 64)), W[0], None, key_heads=1, eps=1e-5),
        lambda: pk.qk_norm_rope(jnp.ones((3, 128)), jnp.ones((3, 64)), key_heads=1, eps=1e-5),
        lambda: pk.qk_norm_rope(jnp.ones((3, 200)), jnp.ones((3, 64)), key_heads=1, eps=1e-5),
        lambda: pk.log_prob_rows(X, W, 1.0, vocab_size=33),
        lambda: pk.token_log_probs(X, W, jnp.zeros(2, jnp.int32), 1.0, vocab_size=32),
        lambda: pk.attention(X[:, None], X[:, None], X[:, None], jnp.arange(3), jnp.arange(3), 0, scale=1.0, split=200),
        lambda: pk.attention(X[:, None], X[:2, None], X[:2, None], jnp.arange(3), jnp.arange(3), 0, scale=1.0),
    ],
)
def test_operands_that_do_not_fit_are_value_errors(call):
    with pytest.raises(ValueError):
        call()


def test_shape_rules_work_on_plain_numbers():
    bf16 = reference.BF16
    (result,) = pk.REGIONS["matmul"].result_types(((7, 64), bf16), ((32, 64), bf16), leaves=1, out_dtype="bfloat16")
    assert result == ((7, 32), bf16)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_symbolic_token_counts_trace_and_have_the_right_shapes(sample):
    rows, shared = operands(sample, 5, jnp.bfloat16)
    (tokens,) = jax.export.symbolic_shape("t")
    symbolic = tuple(jax.ShapeDtypeStruct((tokens, *row.shape[1:]), row.dtype) for row in rows)
    jaxpr = jax.make_jaxpr(lambda rows: sample.call(rows, shared))(symbolic)
    assert all(aval.shape[0] is tokens or aval.shape[0] == tokens for aval in jaxpr.out_avals)


@pytest.mark.parametrize("name", ["matmul_bias", "add_rms_norm"])
def test_exported_with_a_symbolic_token_count_gives_the_same_bits(name):
    sample = BY_NAME[name]
    rows, shared = operands(sample, 35, jnp.bfloat16)
    (tokens,) = jax.export.symbolic_shape("t")
    symbolic = tuple(jax.ShapeDtypeStruct((tokens, *row.shape[1:]), row.dtype) for row in rows)
    exported = jax.export.export(jax.jit(lambda rows: sample.call(rows, shared)))(symbolic)
    for count in (1, 16, 35):
        part = tuple(row[:count] for row in rows)
        for a, b in zip(exported.call(part), sample.call(part, shared), strict=True):
            assert reference.unequal(a, b) == 0


def test_exported_attention_with_a_symbolic_token_count_gives_the_same_bits():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((20, heads, 64)), jnp.float32) for heads in (4, 2, 2))
    positions = jnp.concatenate([jnp.arange(12), jnp.arange(8)]).astype(jnp.int32)

    def call(q, k, v, positions):
        return pk.attention(q, k, v, positions, positions, 0, scale=0.125)

    (tokens,) = jax.export.symbolic_shape("t")
    symbolic = [jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in (q, k, v, positions)]
    exported = jax.export.export(jax.jit(call))(*symbolic)
    assert reference.unequal(exported.call(q, k, v, positions), call(q, k, v, positions)) == 0


def test_a_platform_without_a_form_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="region matmul has no form for platform tpu"):
        jax.jit(pk.matmul).trace(X, W).lower(lowering_platforms=("tpu",))


def test_an_undifferentiable_region_says_so():
    cache, table, one = jnp.ones((1, 16, 1, 64)), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    gradient = jax.grad(lambda q: pk.paged_attention(q, cache, cache, table, one, one, scale=1.0).sum())
    with pytest.raises(NotImplementedError, match="isojax_paged_attention"):
        gradient(jnp.ones((1, 1, 64)))


def test_vmap_maps_only_what_is_batched():
    jaxpr = str(jax.make_jaxpr(jax.vmap(pk.matmul, (0, None)))(jnp.stack([X, X]), W))
    assert "scan" in jaxpr
    assert "bf16[2,32,64]" not in jaxpr


def test_counters_tell_cases_apart():
    counters.reset()
    with counters.case("trainer_score"):
        jax.jit(lambda x: pk.cast(x, dtype="float32") + 1).lower(X)
    with counters.case("engine_decode"):
        counters.record_served("matmul")
        counters.record_served("matmul", "engine_prefill")
    counters.record_served("cast")
    installed, served = counters.snapshot()
    assert installed == {("cast", "trainer_score"): 1}
    assert served == {("matmul", "engine_decode"): 1, ("matmul", "engine_prefill"): 1, ("cast", None): 1}
    counters.reset()
    assert counters.snapshot() == ({}, {})


@pytest.mark.parametrize("name", ["trainer", "", "engine_verify"])
def test_an_unknown_case_is_refused(name):
    with pytest.raises(UnknownCase, match="trainer_fwd"), counters.case(name):
        pass
    with pytest.raises(UnknownCase):
        counters.record_served("matmul", name)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_no_rows_give_no_rows(sample):
    rows, shared = operands(sample, 1, jnp.bfloat16)
    for result, full in zip(
        sample.call(tuple(row[:0] for row in rows), shared), sample.call(rows, shared), strict=True
    ):
        assert result.shape == (0, *full.shape[1:])
        assert result.dtype == full.dtype
