"""The policy's two functions as torch.fx graphs for the engine: attention over the cache, parameters bound."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import torch
from torch import fx

import bridge.attention_backend
import bridge.gpu_attention  # noqa: F401  (both register the engine's ops)
from bridge.torch_ops import op_of
from bridge.translate import Replacement, bind_parameters, replace_region, translate
from pallas_kernels.region import REGIONS

if TYPE_CHECKING:
    from bridge.translate import RegionCall
    from bridge.weights import EngineWeights
    from isojax.policy import Policy

WEIGHT_READERS = ("matmul", "gated_matmul", "log_prob_rows")
"""Regions whose weight operand `w` may be stored wider than the activations, with equal bits."""


@dataclass(frozen=True)
class PolicyGraphs:
    """`hidden(tokens, positions)` and `head(hidden)` with the policy's parameters still as inputs.

    widened: names of parameters that matmuls read; plain: names that something else reads. A tied head is in both.
    """

    hidden: fx.GraphModule
    head: fx.GraphModule
    widened: frozenset[str]
    plain: frozenset[str]

    @classmethod
    def translate(cls, policy: Policy, device: str = "cpu", *, write_with_rope: bool = False) -> PolicyGraphs:
        """Traces the policy at a symbolic token count and puts the cached attention in the attention region's place.

        device: of the constants that the graphs hold. write_with_rope: keys and values go to the cache where they are
        rotated, as the kernels of a card do, and not where attention starts.
        """
        (rows,) = jax.export.symbolic_shape("t")
        integers = jax.ShapeDtypeStruct((rows,), jnp.int32)
        buffers = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in policy.buffers.items()}
        hidden = translate(policy.hidden, policy.parameter_shapes, buffers, *[integers] * 3, device=device)
        hidden = _write_with_rope(hidden) if write_with_rope else replace_region(hidden, "attention", _cached)
        _erase_unused_inputs(hidden)
        states = jax.ShapeDtypeStruct((rows, policy.config.hidden_size), policy.parameter_shapes["embed"].dtype)
        temperature = jax.ShapeDtypeStruct((), jnp.float32)
        head = translate(policy.head_rows, policy.parameter_shapes, states, temperature, device=device)
        _erase_unused_inputs(head)
        widened: set[str] = set()
        plain: set[str] = set()
        for graph in (hidden.graph, head.graph):
            for node in graph.nodes:
                if node.op == "placeholder" and node.meta["isojax_name"] in policy.parameter_shapes:
                    name = node.meta["isojax_name"]
                    (widened if _is_only_weight(node) else plain).add(name)
        return cls(hidden, head, frozenset(widened), frozenset(plain))

    def bind(
        self, weights: EngineWeights, constants: Mapping[str, torch.Tensor]
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Both graphs over the engine's parameters and constants: `hidden(tokens, positions)` and `head(hidden)`.

        A matmul reads a parameter's widened form where the engine holds one.
        """
        bound = []
        for module in (self.hidden, self.head):
            tensors = {}
            for node in module.graph.nodes:
                if node.op == "placeholder":
                    name = node.meta["isojax_name"]
                    if name in self.widened | self.plain:
                        wide = name in weights.widened and _is_only_weight(node)
                        tensors[name] = weights.tensor(name, torch.float32 if wide else weights.dtype)
                    elif name in constants:
                        tensors[name] = constants[name]
            bound.append(bind_parameters(module, tensors))
        return bound[0], bound[1]


def region_names(*graphs: fx.GraphModule) -> list[str]:
    """The regions that the engine's graphs call, each once, in alphabetical order."""
    targets = {node.target for module in graphs for node in module.graph.nodes}
    names = {name for name, region in REGIONS.items() if op_of(region) in targets}
    return sorted(names | {name for target, name in _engine_ops().items() if target in targets})


def _engine_ops() -> dict[object, str]:
    """The engine's own ops around a region of the same bits."""
    ops = torch.ops.isojax
    return {
        ops.cached_attention.default: "paged_attention",
        ops.write_cache.default: "paged_qk_norm_rope",
        ops.attend_cache.default: "paged_attention",
    }


def _cached(call: RegionCall) -> Replacement:
    operands = [call.operands[name] for name in ("q", "k", "v", "positions", "layer")]
    return Replacement(torch.ops.isojax.cached_attention.default, tuple(operands))


def _write_with_rope(hidden: fx.GraphModule) -> fx.GraphModule:
    """Both regions that a layer's cache takes part in become the engine's own ops.

    Raises ValueError where attention does not read what the rotation of its own layer gives.
    """
    rope, attention = op_of(REGIONS["qk_norm_rope"]), op_of(REGIONS["attention"])
    graph = fx.Graph()
    graph.output(graph.graph_copy(hidden.graph, {}))
    for node in [node for node in graph.nodes if node.target is attention]:
        parts = [node.kwargs[name] for name in ("q", "k", "v")]
        source = parts[0].args[0]
        if source.target is not rope or any(
            part.target is not operator.getitem or part.args != (source, index) for index, part in enumerate(parts)
        ):
            raise ValueError(f"{node.name} reads queries, keys and values of {parts}, not those of one qk_norm_rope")
        given, layer = source.kwargs, node.kwargs["layer"]
        operands = (given["qkv"], given["cos_sin"], given.get("q_norm"), given.get("k_norm"), layer)
        with graph.inserting_before(node):
            query = graph.call_function(
                torch.ops.isojax.write_cache.default, (*operands, given["key_heads"], given["eps"])
            )
            attended = graph.call_function(
                torch.ops.isojax.attend_cache.default, (query, node.kwargs["positions"], layer)
            )
        node.replace_all_uses_with(attended)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return fx.GraphModule(hidden, graph, class_name=type(hidden).__name__)


def _is_only_weight(node: fx.Node) -> bool:
    """Whether every use of a parameter, or of a slice of it, is as the weight of a matmul."""
    readers = [getattr(torch.ops.isojax, name).default for name in WEIGHT_READERS]

    def only_weight(value: fx.Node) -> bool:
        return all(
            (user.target in readers and user.kwargs.get("w") is value and list(user.kwargs.values()).count(value) == 1)
            or (user.target is torch.select and only_weight(user))
            for user in value.users
        )

    return bool(node.users) and only_weight(node)


def _erase_unused_inputs(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
