"""Every region as a torch op: its declaration, its bits, its fake form, and what it refuses."""

import re

import jax
import numpy as np
import pytest
import torch
from op_samples import Sample, sample
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from bridge.arrays import shared_views, to_jax, to_torch
from bridge.torch_ops import op_of, schema_of
from pallas_kernels import counters
from pallas_kernels.region import REGIONS, Region, Spec


def call(region: str, given: Sample):
    """The op's results as a tuple."""
    results = op_of(REGIONS[region])(*given.operands, **given.parameters)
    return results if isinstance(results, tuple) else (results,)


def in_jax(region: str, given: Sample):
    """The same through JAX alone, jitted."""
    operands = [np.int32(x) if isinstance(x, int) else to_jax(x) for x in given.operands]
    results = jax.jit(lambda *arrays: REGIONS[region].bind(*arrays, **given.parameters))(*operands)
    return results if isinstance(results, tuple) else (results,)


def assert_equal_bits(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        one, other = (x if isinstance(x, torch.Tensor) else to_torch(x) for x in (one, other))
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


def test_every_region_has_a_sample_and_an_op():
    for region in REGIONS:
        assert sample(region).operands
        assert hasattr(torch.ops.isojax, region)


def test_the_schema_follows_the_declaration():
    assert (
        schema_of(REGIONS["matmul"])
        == "matmul(Tensor x, Tensor w, Tensor? bias=None, *, int leaves, str out_dtype) -> Tensor"
    )
    assert schema_of(REGIONS["add_rms_norm"]).endswith("-> (Tensor, Tensor)")
    assert "int layer" in schema_of(REGIONS["attention"])


@pytest.mark.parametrize(
    ("region", "dtype"),
    [(region, torch.bfloat16) for region in sorted(REGIONS)] + [("matmul", torch.float32), ("rms_norm", torch.float32)],
)
def test_the_op_gives_the_bits_of_jax(region, dtype):
    given = sample(region, dtype=dtype)
    expected = in_jax(region, given)
    results = call(region, given)
    updated = [given.operands[REGIONS[region].operands.index(name)] for name in REGIONS[region].updates]
    assert_equal_bits([*results, *updated], expected)


def test_an_updated_operand_is_written_in_place_and_only_where_its_rows_are():
    given = sample("paged_qk_norm_rope")
    qkv, cos_sin, slots, cache, _, *norms = given.operands
    # One cache as vLLM lays it out: the values' view starts a page behind the keys'.
    before = cache.clone()
    op_of(REGIONS["paged_qk_norm_rope"])(qkv, cos_sin, slots, cache[:-1], cache[1:], *norms, **given.parameters)
    _, k, v = op_of(REGIONS["qk_norm_rope"])(qkv, cos_sin, *norms, **given.parameters)
    page = cache.shape[1]
    slots, k, v = slots[:3], k[:3], v[:3]
    assert slots.tolist() == [2, -1, 4]
    assert torch.equal(cache.view(-1, *cache.shape[2:])[2], k[0])
    assert torch.equal(cache.view(-1, *cache.shape[2:])[2 + page], v[0])
    assert torch.equal(cache[0, :2], before[0, :2])


@pytest.mark.parametrize("region", sorted(REGIONS))
def test_the_op_passes_torchs_own_checks(region):
    given = sample(region)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op_of(REGIONS[region]), given.operands, given.parameters, test_utils=checks)


@pytest.mark.parametrize("region", sorted(REGIONS))
def test_the_fake_form_knows_shapes_and_dtypes(region):
    given = sample(region)
    real = call(region, given)
    with FakeTensorMode() as mode:
        operands = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in given.operands]
        fake = call(region, Sample(tuple(operands), given.parameters))
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


@pytest.mark.parametrize("region", sorted(REGIONS))
def test_the_fake_form_takes_symbolic_sizes(region):
    given = sample(region)

    def program(*operands):
        return call(region, Sample(operands, given.parameters))

    traced = make_fx(program, tracing_mode="symbolic")(*given.operands)
    assert any(node.target is op_of(REGIONS[region]) for node in traced.graph.nodes)


@pytest.mark.parametrize("region", sorted(REGIONS))
def test_no_rows_give_no_rows(region):
    given = sample(region, tokens=9)
    empty = [x[:0] if isinstance(x, torch.Tensor) and x.shape[:1] == (9,) else x for x in given.operands]
    for result, full in zip(call(region, Sample(tuple(empty), given.parameters)), call(region, given), strict=True):
        assert (result.shape, result.dtype) == ((0, *full.shape[1:]), full.dtype)


def test_strided_and_misaligned_operands_give_the_same_bits():
    x, w, bias = sample("matmul").operands
    parameters = sample("matmul").parameters
    op = op_of(REGIONS["matmul"])
    wide = torch.zeros(x.shape[0], 2 * x.shape[1], dtype=x.dtype)
    wide[:, ::2] = x
    shifted = torch.zeros(w.numel() + 1, dtype=w.dtype)[1:].view(w.shape)
    shifted.copy_(w)
    assert_equal_bits([op(wide[:, ::2], shifted, bias, **parameters)], [op(x, w, bias, **parameters)])


def test_an_optional_operand_may_be_left_out_or_none():
    x, w, bias = sample("matmul").operands
    op = op_of(REGIONS["matmul"])
    parameters = sample("matmul").parameters
    without = op(x, w, **parameters)
    assert_equal_bits([without], [op(x, w, None, **parameters)])
    assert not without.equal(op(x, w, bias, **parameters))


def test_an_optional_operand_after_a_missing_one_is_refused():
    qkv, cos_sin, _, k_norm = sample("qk_norm_rope").operands
    with pytest.raises(TypeError, match="optional"):
        op_of(REGIONS["qk_norm_rope"])(qkv, cos_sin, None, k_norm, key_heads=2, eps=1e-5)


def test_int64_operands_are_taken_as_int32():
    given = sample("token_log_probs")
    x, w, targets, temperature = given.operands
    wide = Sample((x, w, targets.to(torch.int64), temperature), given.parameters)
    assert_equal_bits(call("token_log_probs", wide), call("token_log_probs", given))


def test_a_wrong_shape_is_refused_by_the_regions_own_rule():
    with pytest.raises(ValueError, match="matmul"):
        op_of(REGIONS["matmul"])(torch.zeros(2, 3), torch.zeros(4, 5), leaves=1, out_dtype="float32")


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeError, match="float64"):
        op_of(REGIONS["rms_norm"])(torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4), eps=1e-5)


def test_a_gradient_is_refused_and_not_silently_cut():
    x, w = torch.randn(2, 4, requires_grad=True), torch.ones(4)
    with pytest.raises(NotImplementedError, match="gradient"):
        op_of(REGIONS["rms_norm"])(x, w, eps=1e-5)
    with torch.no_grad():
        assert not op_of(REGIONS["rms_norm"])(x, w, eps=1e-5).requires_grad


def test_a_weight_updated_in_place_is_seen_through_its_kept_view():
    given = sample("matmul")
    weight = given.operands[1]
    shared_views.add([weight])
    before = call("matmul", given)[0].clone()
    weight.copy_(sample("matmul", seed=1).operands[1])
    after = call("matmul", given)
    assert not after[0].equal(before)
    assert_equal_bits(after, in_jax("matmul", given))


def test_results_do_not_share_memory_with_operands_or_each_other():
    x = torch.randn(4, 16)
    results = op_of(REGIONS["add_rms_norm"])(x, torch.zeros(4, 16), torch.ones(16), eps=1e-5)
    same = op_of(REGIONS["cast"])(x, dtype="float32")
    addresses = [x.data_ptr(), same.data_ptr(), *(result.data_ptr() for result in results)]
    assert len(set(addresses)) == 4
    kept = x.clone()
    for result in (*results, same):
        result.fill_(-1)
    assert x.equal(kept)


def test_calls_are_counted_in_their_case():
    counters.reset()
    given = sample("swiglu")
    with counters.case("engine_decode"):
        call("swiglu", given)
        call("swiglu", given)
    with counters.case("engine_prefill"):
        call("swiglu", given)
    served = counters.snapshot().served
    assert served["swiglu", "engine_decode"] == 2
    assert served["swiglu", "engine_prefill"] == 1


def test_a_region_declared_later_gets_its_op_on_first_use():
    spec = Spec(version="1", operations=("x",), rounding=(), constants={}, hazards=())
    region = Region(
        name="test_only_keep",
        operands=("x", "layer"),
        parameters={"flag": bool},
        results=("y",),
        shape_rule=lambda x, layer, *, flag: (x,),
        cpu=lambda x, layer, *, flag: (x + layer if flag else x,),
        spec=spec,
    )
    try:
        x = torch.arange(6, dtype=torch.int32)
        assert op_of(region)(x, 4, flag=True).equal(x + 4)
        assert op_of(region)(x, 4, flag=False).equal(x)
        assert re.search(r"int layer, \*, bool flag", schema_of(region))
    finally:
        del REGIONS[region.name]
