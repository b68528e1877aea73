"""The policy's two functions as torch.fx graphs for the engine: attention over the cache, parameters bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import torch
from torch import fx

import bridge.attention_backend  # noqa: F401  (registers torch.ops.isojax.cached_attention)
from bridge.torch_ops import op_of
from bridge.translate import Replacement, bind_parameters, replace_region, translate
from pallas_kernels.region import REGIONS

if TYPE_CHECKING:
    from bridge.translate import RegionCall
    from bridge.weights import EngineWeights
    from isojax.policy import Policy

WEIGHT_READERS = ("matmul", "log_prob_rows")
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
    def translate(cls, policy: Policy, device: str = "cpu") -> PolicyGraphs:
        """Traces the policy at a symbolic token count and puts the cached attention in the attention region's place.

        device: of the constants that the graphs hold.
        """
        (rows,) = jax.export.symbolic_shape("t")
        integers = jax.ShapeDtypeStruct((rows,), jnp.int32)
        buffers = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in policy.buffers.items()}
        hidden = translate(policy.hidden, policy.parameter_shapes, buffers, *[integers] * 3, device=device)
        hidden = replace_region(hidden, "attention", _cached)
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
    cached = torch.ops.isojax.cached_attention.default
    targets = {node.target for module in graphs for node in module.graph.nodes}
    names = {name for name, region in REGIONS.items() if op_of(region) in targets}
    # The engine's own op around the region of the same bits.
    return sorted(names | ({"paged_attention"} if cached in targets else set()))


def _cached(call: RegionCall) -> Replacement:
    operands = [call.operands[name] for name in ("q", "k", "v", "positions", "layer")]
    return Replacement(torch.ops.isojax.cached_attention.default, tuple(operands))


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
