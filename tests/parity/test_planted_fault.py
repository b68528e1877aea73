"""The matrix would notice: one region of the engine runs another schedule, and parity is gone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_samples import running_engine, same_bits
from torch import fx

from bridge.translate import merge_segments
from isojax.rl.rollout import Sampling

pytestmark = [pytest.mark.engine, pytest.mark.long_file(30)]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_engine(tmp_path_factory.mktemp("policy") / "exported", "float32", tied=True) as engine:
        yield engine


def _one_leaf_less(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "leaves": 2}


def _other_epsilon(node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "eps": node.kwargs["eps"] * 1.5}


@pytest.mark.parametrize(
    ("region", "name", "change"),
    [("matmul", "layers_1_matmul_2", _one_leaf_less), ("add_rms_norm", "layers_0_add_rms_norm", _other_epsilon)],
    ids=["leaves of one matmul", "epsilon of one norm"],
)
def test_another_schedule_in_one_region_fails_parity(running, region, name, change):
    prompts = running.prompts([9, 20], seed=7)
    sampling = Sampling(max_tokens=6, seed=7)
    good = running.engine.generate(prompts, sampling)
    assert same_bits([c.log_probs for c in good], running.trainer_score(good))

    model = running.engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()
    graph, merged = model._hidden_graph, model._hidden
    model._hidden = merge_segments(_changed(graph, getattr(torch.ops.isojax, region).default, name, change))
    running.engine._empty_prefix_cache()
    try:
        planted = running.engine.generate(prompts, sampling)
    finally:
        model._hidden = merged
        running.engine._empty_prefix_cache()
    sampled, trained = ([c.log_probs for c in planted], running.trainer_score(planted))
    assert not same_bits(sampled, trained), "the planted fault went unnoticed"
    largest = max(float(np.abs(left - right).max()) for left, right in zip(sampled, trained, strict=True))
    assert largest < 1e-3, "it was meant to be a rounding, which a tolerance would let pass"


def _changed(module: fx.GraphModule, target: object, name: str, change) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    nodes = [node for node in graph.nodes if node.target is target and node.name == name]
    assert len(nodes) == 1, [node.name for node in graph.nodes]
    change(nodes[0])
    return fx.GraphModule(module, graph)
