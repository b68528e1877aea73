"""The translated graph, run region by region, against the trainer's forward: what `isojax bisect` compares."""

from pathlib import Path

import pytest
from tiny_policies import tiny

from bridge import torch_ops
from bridge.executor import run_graph
from isojax.evidence.bisect import find_parting
from isojax.evidence.capture import capture_forward
from isojax.policy import pack
from pallas_kernels.region import REGIONS


@pytest.fixture(scope="module")
def both():
    sample = tiny("llama")
    batch = pack([(1, 2, 3, 4, 5), (6, 7)], length_multiple=32)
    return capture_forward(sample.policy, sample.parameters, batch), sample, batch


def test_the_graph_returns_the_trainers_bits_in_every_region_of_every_layer(both):
    trainer, sample, batch = both
    graph = run_graph(Path(), sample.policy, sample.parameters, batch)
    assert [(call.region, call.layer) for call in graph] == [(call.region, call.layer) for call in trainer]
    assert {call.layer for call in graph} == {None, 0, 1}
    assert find_parting(trainer, graph) is None


def test_a_region_that_rounds_otherwise_in_torch_is_named_with_its_layer(both, monkeypatch):
    trainer, sample, batch = both
    honest, calls = torch_ops.compiled, []

    def wrong(region, parameters):
        function = honest(region, parameters)

        def one_bit_off(*operands):
            calls.append(region.name)
            results = function(*operands)
            # The second call is layer 1's.
            if region is REGIONS["gated_matmul"] and calls.count("gated_matmul") == 2:
                return tuple(result.at[3, 0].add(2**-6 * (1 + abs(result[3, 0]))) for result in results)
            return results

        return one_bit_off

    monkeypatch.setattr(torch_ops, "compiled", wrong)
    found = find_parting(trainer, run_graph(Path(), sample.policy, sample.parameters, batch))
    assert (found.region, found.layer, found.row) == ("gated_matmul", 1, 3)
