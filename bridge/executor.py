"""Runs the translated graph in torch, node by node, and keeps what every region returned, for `isojax bisect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from bridge.arrays import to_jax, to_torch
from bridge.torch_ops import op_of
from bridge.translate import translate
from contracts.errors import BadConfig
from isojax.evidence.capture import RegionOutput, forward_program
from isojax.policy import PackedBatch, Policy
from pallas_kernels.region import REGIONS


def run_graph(folder: Path, policy: Policy, params: Mapping[str, jax.Array], batch: PackedBatch) -> list[RegionOutput]:
    """Every region's result of the policy's graph as an engine runs it, attention packed; an `isojax.executors` entry.

    params: packed parameters. The head's full rows come last. Raises BadConfig if the graph's regions are not those of
    the policy's own forward, which would be a fault of the translator.
    """
    module = translate(_forward(policy), policy.parameter_shapes, policy.buffers, *_symbolic_rows())
    given = {**params, **policy.buffers}
    for name in ("tokens", "positions", "segment_ids"):
        given[name] = jnp.asarray(getattr(batch, name), jnp.int32)
    inputs = [given[node.meta["isojax_name"]] for node in module.graph.nodes if node.op == "placeholder"]
    recorder = _Recorder(module)
    recorder.run(*(to_torch(value) for value in inputs))
    program = forward_program(policy)
    if [region for region, _ in program] != [region for region, _ in recorder.calls]:
        raise BadConfig(
            field="regions of the graph",
            found=[region for region, _ in recorder.calls],
            allowed=[region for region, _ in program],
            reason="The translated graph does not call what the policy's forward calls.",
        )
    return [
        RegionOutput(region, layer, results)
        for (region, layer), (_, results) in zip(program, recorder.calls, strict=True)
    ]


def _forward(policy: Policy) -> Any:
    def forward(params: Any, buffers: Any, tokens: Any, positions: Any, segment_ids: Any) -> jax.Array:
        hidden = policy.hidden(params, buffers, tokens, positions, segment_ids)
        return policy.head_rows(params, hidden, 1.0)

    return forward


def _symbolic_rows() -> list[jax.ShapeDtypeStruct]:
    (rows,) = jax.export.symbolic_shape("t")
    return [jax.ShapeDtypeStruct((rows,), jnp.int32)] * 3


class _Recorder(fx.Interpreter):
    """Keeps name and results of every region that a graph calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: list[tuple[str, tuple[np.ndarray, ...]]] = []
        self._regions = {op_of(region): name for name, region in REGIONS.items()}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        region = self._regions.get(n.target) if n.op == "call_function" else None  # type: ignore[arg-type]
        if region is not None:
            tensors = (result,) if isinstance(result, torch.Tensor) else result
            # Copied: the memory may be used again once the graph has gone on.
            self.calls.append((region, tuple(np.array(to_jax(tensor)) for tensor in tensors)))
        return result
