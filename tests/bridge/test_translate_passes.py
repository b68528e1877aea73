"""Replacing a region, binding parameters and merging segments keep the graph's meaning and the parameters' memory."""

import gc
import weakref

import jax.numpy as jnp
import pytest
import torch
from tiny_policies import LAYERS, batch, same_bits, tiny

from bridge.arrays import is_viewable, shared_views
from bridge.torch_ops import op_of
from bridge.translate import Replacement, bind_parameters, merge_segments, replace_region, translate
from contracts.errors import BadCheckpoint
from pallas_kernels import counters
from pallas_kernels.region import REGIONS

TOKENS = 5
CALLS: list[int] = []


def engine_attention(q, k, v, positions, segment_ids, layer):
    """What an engine would put in the region's place: its own function, told the layer."""
    CALLS.append(layer)
    op = op_of(REGIONS["attention"])
    return op(q, k, v, positions, segment_ids, 0, scale=tiny("qwen3").policy.config.softmax_scale, split=512)


def with_engine_attention():
    def replacement(call):
        names = ("q", "k", "v", "positions", "segment_ids", "layer")
        return Replacement(engine_attention, tuple(call.operands[name] for name in names))

    return replace_region(tiny("qwen3").hidden, "attention", replacement)


def own_tensors():
    return {name: tensor.clone() for name, tensor in tiny("qwen3").tensors.items()}


def test_a_replaced_region_is_called_with_its_operands_once_a_layer():
    original = tiny("qwen3").hidden.code
    graph = with_engine_attention()
    assert "isojax.attention" not in graph.code
    assert tiny("qwen3").hidden.code == original
    CALLS.clear()
    assert same_bits(bind_parameters(graph, own_tensors())(*batch(TOKENS)), tiny("qwen3").in_jax(TOKENS))
    assert list(range(LAYERS)) == CALLS


def test_the_call_that_is_replaced_is_described():
    calls = []

    def keep(call):
        calls.append(call)
        return Replacement(op_of(REGIONS["matmul"]), keywords={**call.operands, **call.parameters})

    replace_region(tiny("qwen3").hidden, "matmul", keep)
    first = calls[0]
    assert first.name == "layers_0_matmul"
    assert list(first.operands) == ["x", "w", "bias"]
    assert first.parameters == {"leaves": 1, "out_dtype": "float32"}


def test_a_region_that_is_not_there_is_refused():
    with pytest.raises(KeyError, match="softmax"):
        replace_region(tiny("qwen3").hidden, "softmax", lambda call: Replacement(torch.add))
    with pytest.raises(ValueError, match="does not call region cast"):
        replace_region(tiny("qwen3").hidden, "cast", lambda call: Replacement(torch.add))


def test_bound_parameters_are_views_and_no_state_of_the_module():
    tensors = own_tensors()
    bound = bind_parameters(tiny("qwen3").hidden, tensors)
    assert bound.layers_1_qkv.data_ptr() == tensors["layers.qkv"][1].data_ptr()
    assert bound.norms_squeeze.data_ptr() == tensors["norms"].data_ptr()
    assert not bound.state_dict()
    inputs = [node.name for node in bound.graph.nodes if node.op == "placeholder"]
    assert inputs == ["tokens", "positions", "segment_ids"]
    assert "torch.select" not in bound.code


def test_some_parameters_may_stay_inputs():
    tensors = own_tensors()
    bound = bind_parameters(tiny("qwen3").hidden, {"layers.qkv": tensors["layers.qkv"]})
    inputs = [node.name for node in bound.graph.nodes if node.op == "placeholder"]
    assert "layers_qkv" not in inputs
    assert "layers_down" in inputs


def test_an_unknown_parameter_is_refused():
    with pytest.raises(BadCheckpoint, match=r"layers\.gate"):
        bind_parameters(tiny("qwen3").hidden, {"layers.gate": torch.zeros(2)})


def test_a_parameter_whose_slices_are_copies_is_refused():
    flat = translate(lambda weight, x: (weight.reshape(-1), x), jnp.zeros((3, 4)), jnp.zeros(2))
    assert bind_parameters(flat, {"weight": torch.zeros(3, 4)})(torch.zeros(2))[0].shape == (12,)
    with pytest.raises(BadCheckpoint, match="copy would not see the next weight update"):
        bind_parameters(flat, {"weight": torch.zeros(4, 3).T})


def test_a_parameter_of_another_shape_is_refused():
    tensors = own_tensors()
    tensors["layers.down"] = tensors["layers.down"][:, :, 1:]
    with pytest.raises(BadCheckpoint, match=r"layers\.down.*\(2, 32, 47\).*\(2, 32, 48\)"):
        bind_parameters(tiny("qwen3").hidden, tensors)


@pytest.mark.parametrize("merged", [False, True])
def test_an_update_in_place_is_seen_by_every_layer(merged):
    tensors = own_tensors()
    # Heads of 8 fp32 elements: the second layer's norm lies at 32 bytes, where JAX cannot share memory.
    assert not is_viewable(tensors["layers.q_norm"][1])
    graph = bind_parameters(tiny("qwen3").hidden, tensors)
    graph = merge_segments(graph) if merged else graph
    expected = graph(*batch(TOKENS)).clone()
    for name in ("layers.q_norm", "layers.down", "norms", "embed"):
        kept = tensors[name].clone()
        tensors[name].mul_(2)
        assert not same_bits(graph(*batch(TOKENS)), expected), name
        tensors[name].copy_(kept)
        assert same_bits(graph(*batch(TOKENS)), expected), name


def test_segments_lie_between_the_engines_attentions_and_layers_share_an_executable():
    merged = merge_segments(bind_parameters(with_engine_attention(), own_tensors()))
    segments = dict(merged.named_children())
    assert list(segments) == [f"segment_{index}" for index in range(LAYERS + 1)]
    assert {segment.regions for segment in segments.values()} == {
        ("rms_norm", "matmul", "qk_norm_rope"),
        ("matmul", "add_rms_norm", "gated_matmul", "matmul", "add_rms_norm", "matmul", "qk_norm_rope"),
        ("matmul", "add_rms_norm", "gated_matmul", "matmul", "add_rms_norm"),
    }
    again = merge_segments(bind_parameters(with_engine_attention(), own_tensors()))
    assert all(getattr(again, name)._call is segment._call for name, segment in segments.items())
    assert "layers_0_matmul_1" in repr(segments["segment_1"])
    CALLS.clear()
    assert same_bits(merged(*batch(TOKENS)), tiny("qwen3").in_jax(TOKENS))
    assert list(range(LAYERS)) == CALLS


def test_merged_and_unmerged_graphs_count_the_same_calls():
    served = []
    for graph in (tiny("qwen3").bound, tiny("qwen3").merged):
        counters.reset()
        with counters.case("engine_prefill"):
            graph(*batch(TOKENS))
        served.append(counters.snapshot().served)
    assert served[0] == served[1]
    assert served[0]["matmul", "engine_prefill"] == 3 * LAYERS


def test_nothing_outlives_the_graphs():
    gc.collect()
    views = len(shared_views)
    tensors = own_tensors()
    bound = bind_parameters(tiny("qwen3").hidden, tensors)
    merged = merge_segments(bound)
    assert len(shared_views) > views
    storage = weakref.ref(tensors["layers.qkv"].untyped_storage())
    weight = weakref.ref(tensors["layers.qkv"])
    del bound, merged, tensors
    gc.collect()
    assert weight() is None
    assert storage() is None
    assert len(shared_views) == views
