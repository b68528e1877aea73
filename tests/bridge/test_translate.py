"""The translated graph of a policy is the policy: same bits, a node a region, readable, only moves between."""

import re
from collections import Counter

import jax
import pytest
import torch
from tiny_policies import LAYERS, batch, same_bits, tiny
from torch.fx.experimental.proxy_tensor import make_fx

from bridge.arrays import to_torch
from bridge.torch_ops import op_of
from bridge.translate import Replacement, bind_parameters, replace_region
from bridge.translate.dimensions import is_size
from bridge.translate.moves import JAX_FORMS
from pallas_kernels.region import REGIONS

pytestmark = pytest.mark.long_file(40)

CASES = [("llama", 1), ("llama", 17), ("qwen3", 5)]


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_the_graph_gives_the_bits_of_jax(name, tokens):
    assert same_bits(tiny(name).bound(*batch(tokens)), tiny(name).in_jax(tokens))


@pytest.mark.parametrize(("name", "tokens"), CASES[1:])
def test_the_merged_graph_gives_the_bits_of_jax(name, tokens):
    assert same_bits(tiny(name).merged(*batch(tokens)), tiny(name).in_jax(tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_head_gives_the_bits_of_jax(name):
    policy, parameters = tiny(name).policy, tiny(name).parameters
    hidden = tiny(name).in_jax(17 if name == "llama" else 5)
    tensors = {key: tiny(name).tensors[key] for key in parameters}
    rows = bind_parameters(tiny(name).head, tensors)(hidden, torch.tensor(0.7))
    expected = jax.jit(policy.head_rows)(parameters, jax.dlpack.from_dlpack(hidden), jax.numpy.float32(0.7))
    assert same_bits(rows, to_torch(expected))


@pytest.mark.parametrize("kind", ["bound", "merged"])
def test_int64_tokens_and_positions_give_the_same_bits(kind):
    wide = [x.to(torch.int64) for x in batch(17)]
    assert same_bits(getattr(tiny("llama"), kind)(*wide), tiny("llama").in_jax(17))


def test_another_schedule_in_one_region_is_caught():
    def with_one_leaf(call):
        return Replacement(op_of(REGIONS["matmul"]), keywords={**call.operands, **call.parameters, "leaves": 1})

    graph = bind_parameters(replace_region(tiny("qwen3").hidden, "matmul", with_one_leaf), tiny("qwen3").tensors)
    result, expected = graph(*batch(5)), tiny("qwen3").in_jax(5)
    torch.testing.assert_close(result, expected)
    assert not same_bits(result, expected)


def test_another_layers_parameters_are_caught():
    exchanged = {**tiny("llama").tensors}
    exchanged["layers.down"] = exchanged["layers.down"].flip(0).contiguous()
    result = bind_parameters(tiny("llama").hidden, exchanged)(*batch(17))
    assert not same_bits(result, tiny("llama").in_jax(17))


def test_every_layer_calls_the_same_regions_and_attention_knows_its_layer():
    graph = tiny("qwen3").hidden.graph
    names = {op_of(region): region.name for region in REGIONS.values()}
    calls = Counter(names[node.target] for node in graph.nodes if node.target in names)
    assert calls == {
        "rms_norm": 1,
        "matmul": 3 * LAYERS,
        "qk_norm_rope": LAYERS,
        "attention": LAYERS,
        "gated_matmul": LAYERS,
        "add_rms_norm": 2 * LAYERS,
    }
    layers = [node.kwargs["layer"] for node in graph.nodes if names.get(node.target) == "attention"]
    assert layers == list(range(LAYERS))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_everything_between_the_regions_is_a_move(name):
    regions = {op_of(region) for region in REGIONS.values()}
    for node in tiny(name).hidden.graph.nodes:
        if node.op in ("call_function", "call_method"):
            assert node.target in regions or node.target in JAX_FORMS or is_size(node), node.format_node()


def test_the_graph_reads_like_the_policy():
    code = tiny("qwen3").hidden.code
    for line in (
        r"t = tokens\.size\(0\)",
        r"embed_rows = torch\.index_select\(embed, 0, tokens\)",
        r"layers_1_qkv = torch\.select\(layers_qkv, 0, 1\)",
        r"layers_1_matmul = torch\.ops\.isojax\.matmul\.default\(x = layers_0_add_rms_norm_normed_1, w = layers_1_qkv, "
        r"bias = layers_1_qkv_bias, leaves = 1, out_dtype = 'float32'\)",
        r"layers_1_attention = torch\.ops\.isojax\.attention\.default\(q = .*, layer = 1, scale = .*, split = 1024\)",
        r"layers_1_matmul_1 = .*w = layers_1_o, bias = layers_1_o_bias, leaves = 4",
        r"return layers_1_add_rms_norm_normed_1",
    ):
        assert re.search(line, code), line


def test_inputs_carry_the_dotted_names():
    inputs = [node for node in tiny("llama").hidden.graph.nodes if node.op == "placeholder"]
    names = {node.name: node.meta["isojax_name"] for node in inputs}
    assert names["layers_gate_up"] == "layers.gate_up"
    assert names["rope_table"] == "rope_table"
    assert list(names)[-3:] == ["tokens", "positions", "segment_ids"]


@pytest.mark.parametrize("kind", ["bound", "merged"])
def test_a_token_outside_of_the_vocabulary_never_gives_a_plausible_row(kind):
    ids, positions, segments = batch(17)
    ids = ids.clone()
    ids[3] = 40
    graph = getattr(tiny("llama"), kind)
    if kind == "bound":
        with pytest.raises((RuntimeError, IndexError), match="index"):
            graph(ids, positions, segments)
    else:
        assert graph(ids, positions, segments)[3].isnan().all()


def test_the_graph_traces_with_fake_tensors_and_a_symbolic_token_count():
    traced = make_fx(tiny("llama").bound, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*batch(5))
    (result,) = next(node for node in traced.graph.nodes if node.op == "output").args
    rows, columns = result.meta["val"].shape
    assert str(rows).startswith("s")
    assert columns == 32
