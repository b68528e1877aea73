"""Merges the nodes between an engine's own ops into one jitted JAX call each, with the same bits."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from bridge.arrays import is_viewable, shared_views, to_jax, to_torch
from bridge.torch_ops import STATIC_OPERANDS, op_of, operand_name
from bridge.translate.dimensions import is_size
from bridge.translate.moves import JAX_FORMS
from pallas_kernels import counters
from pallas_kernels.region import REGIONS, Region

DIVIDERS = ("attention", "paged_attention")
"""Regions that stay calls of their own: an engine puts its cached attention in their place."""


@dataclass(frozen=True)
class _Slot:
    """The value with this number in a program: first its inputs, then one a step."""

    index: int


@dataclass(frozen=True)
class _Step:
    """One node: a region or the JAX form of a move, its arguments holding slots where the node's held nodes."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Program:
    """What a segment computes. Layers with the same structure have equal programs, and so share one executable."""

    sizes: int
    inputs: int
    steps: tuple[_Step, ...]
    outputs: tuple[int, ...]


class Segment(torch.nn.Module):
    """A run of regions and moves as one jitted call on torch tensors.

    Takes the sizes it needs (integers; another value compiles anew) and then its tensors. Parameters are bound inside,
    by views of their memory, so an update in place is seen by the next call.
    """

    def __init__(self, program: _Program, names: Sequence[str], regions: Sequence[str], fixed: dict[int, torch.Tensor]):
        super().__init__()
        self.names = tuple(names)
        self.regions = tuple(regions)
        self._call = _compiled(program)
        # One entry an input: a view for a parameter, None for what a call gives.
        self._template: list[Any] = [None] * program.inputs
        self._copied = []
        for index, tensor in fixed.items():
            if is_viewable(tensor):
                self._template[index] = shared_views.to_jax(tensor)
            else:
                self._copied.append((index, tensor))
        self._given = [index for index in range(program.inputs) if index not in fixed]

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """The results that later nodes read, in order."""
        inputs = self._template.copy()
        for index, argument in zip(self._given, arguments, strict=True):
            inputs[index] = argument if isinstance(argument, int) else shared_views.to_jax(argument)
        for index, tensor in self._copied:
            inputs[index] = to_jax(tensor)
        for region in self.regions:
            counters.record_served(region)
        return tuple([to_torch(result) for result in self._call(*inputs)])

    def extra_repr(self) -> str:
        return ", ".join(self.names)


def merge_segments(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a bound graph module in which every run of regions and moves between attentions is one `Segment`.

    Attention stays and divides the runs, as does any op that is neither a region nor a move. Regions are isolated from
    their neighbours, so the bits are those of the unmerged graph, which stays what people read. For the CPU: there a
    call costs more than a small region computes.
    """
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    segments: dict[str, Segment] = {}
    run: list[fx.Node] = []

    def flush() -> None:
        if not run:
            return
        name = f"segment_{len(segments)}"
        segments[name], given, results = _build(module, run)
        call = graph.call_module(name, tuple(map(read, given)))
        for index, node in enumerate(results):
            values[node] = graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
        run.clear()

    def read(source: fx.Node) -> Any:
        if source not in values:
            values[source] = graph.node_copy(source)
        return values[source]

    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue  # Copied where a remaining node reads it; a segment holds its own.
        if _is_mergeable(node, run):
            run.append(node)
            continue
        if any(source in run for source in node.all_input_nodes):
            flush()
        values[node] = graph.node_copy(node, read)
    attributes = {node.target: getattr(module, node.target) for node in graph.nodes if node.op == "get_attr"}
    merged = fx.GraphModule({**segments, **attributes}, graph, class_name=f"Merged{type(module).__name__}")
    merged.graph.lint()
    return merged


def _region_of_op(target: Any) -> Region | None:
    return next((region for region in REGIONS.values() if op_of(region) is target), None)


def _is_mergeable(node: fx.Node, run: Sequence[fx.Node]) -> bool:
    if node.op not in ("call_function", "call_method") or is_size(node):
        return False
    if node.target is operator.getitem:
        # Part of what it takes apart: the results of an engine's own op stay outside.
        return node.args[0] in run
    region = _region_of_op(node.target)
    return node.target in JAX_FORMS if region is None else region.name not in DIVIDERS


def _build(module: fx.GraphModule, run: Sequence[fx.Node]) -> tuple[Segment, list[fx.Node], list[fx.Node]]:
    """The segment of a run, the nodes it must be given, and the nodes of the run that others read."""
    inputs = list(dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in run))
    # Sizes first: they are static arguments of the jitted call.
    inputs.sort(key=lambda node: not is_size(node))
    slots = {node: _Slot(index) for index, node in enumerate([*inputs, *run])}
    results = [node for node in run if any(user not in run for user in node.users)]
    program = _Program(
        sizes=sum(map(is_size, inputs)),
        inputs=len(inputs),
        steps=tuple(_step(node, slots) for node in run),
        outputs=tuple(slots[node].index for node in results),
    )
    fixed = {index: getattr(module, str(node.target)) for index, node in enumerate(inputs) if node.op == "get_attr"}
    regions = [region.name for node in run if (region := _region_of_op(node.target)) is not None]
    segment = Segment(program, [node.name for node in run], regions, fixed)
    return segment, [node for node in inputs if node.op != "get_attr"], results


def _step(node: fx.Node, slots: dict[fx.Node, _Slot]) -> _Step:
    arguments, keywords = (_frozen(_mapped(part, slots)) for part in (node.args, node.kwargs))
    return _Step(_region_of_op(node.target) or JAX_FORMS[node.target], arguments, keywords)


def _mapped(part: Any, slots: dict[fx.Node, Any]) -> Any:
    return fx.node.map_arg(part, slots.__getitem__)


def _frozen(value: Any) -> Any:
    """A hashable form of a node's arguments, so that equal programs are found equal."""
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@cache
def _compiled(program: _Program) -> Callable[..., Any]:
    def run(*inputs: Any) -> list[Any]:
        values = list(inputs)

        def read(value: Any) -> Any:
            if isinstance(value, _Slot):
                return values[value.index]
            return [read(item) for item in value] if isinstance(value, tuple) else value

        for step in program.steps:
            arguments = [read(value) for value in step.arguments]
            keywords = {name: read(value) for name, value in step.keywords}
            if isinstance(step.function, Region):
                values.append(_bind(step.function, keywords))
            else:
                values.append(step.function(*arguments, **keywords))
        return [values[index] for index in program.outputs]

    return jax.jit(run, static_argnums=tuple(range(program.sizes)))


def _bind(region: Region, keywords: dict[str, Any]) -> Any:
    operands = []
    for name in map(operand_name, region.operands):
        operand = keywords.pop(name, None)
        if operand is None:
            break
        operands.append(jnp.asarray(operand, STATIC_OPERANDS[name]) if name in STATIC_OPERANDS else operand)
    return region.bind(*operands, **keywords)
