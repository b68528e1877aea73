"""On a card regions get dense operands, by copies that show in the graph; every layer starts at an aligned address."""

import itertools

import pytest
import torch
from tiny_policies import LAYERS, batch, same_bits, tiny
from torch import fx

from bridge.digest import weight_digest
from bridge.torch_ops import op_of
from bridge.translate import dense_operands
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
    bound = tiny("qwen3").bound
    dense = dense_operands(bound)
    inputs = batch(9)
    before, after = _Strided(bound), _Strided(dense)
    expected, result = before.run(*inputs), after.run(*inputs)
    # Queries, keys and values are slices of one projection; the packed attention here reads the values too.
    assert before.found == 3 * LAYERS
    assert after.found == 0
    assert same_bits(expected, result)
    copies = [node for node in dense.graph.nodes if node.target == "contiguous"]
    # The heads that come out of attention are dense already: torch returns them as they are.
    assert len(copies) == 4 * LAYERS
    assert not dense._buffers, "parameters became module state"


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
