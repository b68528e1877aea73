"""On a card regions get dense operands, by copies that show in the graph; every layer starts at an aligned address."""

import itertools
import operator
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import torch
from tiny_policies import LAYERS, same_bits, tiny
from torch import fx

import pallas_kernels
from bridge.digest import weight_digest
from bridge.graphs import PolicyGraphs, _write_with_rope
from bridge.torch_ops import op_of
from bridge.translate import bind_parameters, dense_operands, translate
from bridge.weights import ROW_ALIGNMENT, _write, _zeros
from pallas_kernels.region import REGIONS


class _Strided(fx.Interpreter):
    """Counts tensors that regions are given in a form that no sealed kernel takes."""

    found = 0

    def run_node(self, n: fx.Node) -> object:
        if n.op == "call_function" and n.target in {op_of(region) for region in REGIONS.values()}:
            _, keywords = self.fetch_args_kwargs_from_env(n)
            self.found += sum(isinstance(x, torch.Tensor) and not x.is_contiguous() for x in keywords.values())
        return super().run_node(n)


def test_regions_get_dense_operands_by_copies_that_show():
    def halves(x: jax.Array) -> jax.Array:
        return pallas_kernels.residual_add(*jnp.split(x, 2, axis=1))

    bound = translate(halves, jax.ShapeDtypeStruct((*jax.export.symbolic_shape("t"), 64), jnp.float32))
    dense = dense_operands(bound)
    before, after = _Strided(bound), _Strided(dense)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    assert same_bits(before.run(x), after.run(x))
    assert (before.found, after.found) == (2, 0)
    assert [node.target for node in dense.graph.nodes].count("contiguous") == 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_between_a_cards_regions_nothing_moves(family):
    graphs = PolicyGraphs.translate(tiny(family).policy, write_with_rope=True)
    inputs = {node.meta["isojax_name"] for node in graphs.hidden.graph.nodes if node.op == "placeholder"}
    tensors = {name: tensor for name, tensor in tiny(family).tensors.items() if name in inputs}
    dense = dense_operands(bind_parameters(graphs.hidden, tensors))
    assert not dense._buffers, "parameters became module state"
    moves = [node.target for node in dense.graph.nodes if node.op.startswith("call_") and not _is_of_isojax(node)]
    # The token count and two gathers at the entry of a step, then views of whole results.
    assert [target for target in moves if target not in (operator.getitem, torch.reshape)] == ["size"] + [
        torch.index_select
    ] * 2
    calls = Counter(node.target.name() for node in dense.graph.nodes if _is_of_isojax(node))
    assert calls == {
        "isojax::rms_norm": 1,
        "isojax::write_cache": LAYERS,
        "isojax::attend_cache": LAYERS,
        "isojax::matmul": 3 * LAYERS,
        "isojax::add_rms_norm": 2 * LAYERS,
        "isojax::gated_matmul": LAYERS,
    }


def test_attention_that_reads_something_else_than_its_layers_rotation_is_refused():
    hidden = tiny("qwen3").hidden
    graph = fx.Graph()
    graph.output(graph.graph_copy(hidden.graph, {}))
    attention = next(node for node in graph.nodes if node.target is op_of(REGIONS["attention"]))
    attention.kwargs = {**attention.kwargs, "v": attention.kwargs["k"]}
    with pytest.raises(ValueError, match="not those of one qk_norm_rope"):
        _write_with_rope(fx.GraphModule(hidden, graph))


def _is_of_isojax(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "isojax"


@pytest.mark.parametrize("shape", [(3, 5, 7), (4, 130), (2, 128, 4)])
def test_stacked_parameters_are_aligned_row_by_row_and_written_like_flat_ones(shape):
    padded = _zeros(shape, torch.bfloat16, torch.device("cpu"), aligned=True)
    assert padded.shape == shape
    start = padded.data_ptr()
    for row in padded:
        assert row.is_contiguous()
        assert (row.data_ptr() - start) % ROW_ALIGNMENT == 0
    values = torch.arange(padded.numel(), dtype=torch.float32).to(torch.bfloat16)
    flat = torch.zeros(shape, dtype=torch.bfloat16)
    cuts = [0, 3, padded.numel() // 2 + 1, padded.numel()]
    for first, last in itertools.pairwise(cuts):
        for tensor in (padded, flat):
            _write(tensor, first, values[first:last])
    assert same_bits(padded, flat)
    assert weight_digest({"w": padded}) == weight_digest({"w": flat})
