"""Writes nodes with readable names into the torch.fx graph that a translation builds."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import fx

from bridge.arrays import to_torch
from bridge.translate.dimensions import Dimensions
from bridge.translate.moves import VIEWS

Value = fx.Node | np.ndarray
"""A value of the trace: a node of the graph, or a constant that is known now (a literal, a layer index)."""


class Emitter:
    """The graph under construction, the current name prefix (`layers_3_`), and the constants."""

    def __init__(self, device: torch.device) -> None:
        self.graph = fx.Graph()
        self.dimensions = Dimensions(self.graph)
        self.constants: dict[str, torch.Tensor] = {}
        self.device = device
        self._constant_nodes: dict[tuple[str, tuple[int, ...], bytes], fx.Node] = {}
        self._prefix = ""

    @contextmanager
    def prefix(self, text: str) -> Iterator[None]:
        """Nodes made inside get this in front of their name, after that of the blocks around it."""
        outer, self._prefix = self._prefix, self._prefix + text
        yield
        self._prefix = outer

    def call(self, function: Callable[..., Any], *arguments: Any, name: str, **keywords: Any) -> fx.Node:
        """A node that calls a function; a view of an input is named after the input."""
        source = self.viewed_input(arguments[0]) if function in VIEWS else None
        full_name = self._prefix + (f"{source}_{name}" if source else name)
        node = self.graph.create_node("call_function", function, arguments, keywords, name=full_name)
        if source:
            node.meta["viewed_input"] = source
        return node

    def trip(self, stacked: fx.Node, index: int) -> fx.Node:
        """Row `index` of an operand of a scan, a view; a parameter's is called `layers_<index>_<parameter>`."""
        name = (self.viewed_input(stacked) or "select").removeprefix("layers_")
        node = self.graph.create_node("call_function", torch.select, (stacked, 0, index), name=self._prefix + name)
        node.meta["viewed_input"] = name
        return node

    @staticmethod
    def viewed_input(node: fx.Node) -> str | None:
        """The name of the input that a node is, or only views."""
        return node.name if node.op == "placeholder" else node.meta.get("viewed_input")

    def method(self, method: str, *arguments: Any, name: str) -> fx.Node:
        """A node that calls a method of its first argument."""
        return self.graph.create_node("call_method", method, arguments, name=self._prefix + name)

    def items(self, results: fx.Node, names: Sequence[str]) -> list[Value]:
        """One node for each of the results of a node that returns several."""
        return [self.call(operator.getitem, results, index, name=name) for index, name in enumerate(names)]

    def node(self, value: Value) -> fx.Node:
        """The value as a node; a constant becomes a buffer of the graph's module, one for equal constants."""
        if isinstance(value, fx.Node):
            return value
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self._constant_nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = to_torch(jnp.asarray(value)).clone().to(self.device)
            # At the head of the graph, so that it is there for whatever comes later.
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self._constant_nodes[key] = self.graph.create_node("get_attr", name, name=name)
        return self._constant_nodes[key]

    def reshape(self, x: fx.Node, shape: Sequence[object], name: str = "reshape") -> fx.Node:
        """A reshape to a shape that may hold symbolic sizes."""
        return self.call(torch.reshape, x, self.dimensions.sizes(shape), name=name)
