"""Graph to graph: put an engine's own op in a region's place, and fix the parameters."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bridge.arrays import shared_views
from bridge.torch_ops import NAMESPACE, op_of, operand_name
from bridge.translate.moves import VIEWS
from contracts.errors import BadCheckpoint
from pallas_kernels.region import REGIONS


@dataclass(frozen=True)
class RegionCall:
    """One call of a region in a graph: its node's name, its operands (nodes; integers where static), its parameters."""

    name: str
    operands: Mapping[str, Any]
    parameters: Mapping[str, int | float | bool | str]


@dataclass(frozen=True)
class Replacement:
    """What to call instead; the arguments may be nodes of the `RegionCall` and anything that torch.fx can print."""

    target: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None


def replace_region(
    module: fx.GraphModule, region: str, replacement: Callable[[RegionCall], Replacement]
) -> fx.GraphModule:
    """A copy of a translated graph in which every call of `region` calls something else with the same results.

    An engine puts its paged attention in like this, one call a layer, `layer` being a plain integer:

        replace_region(module, "attention", lambda call: Replacement(
            torch.ops.isojax.paged_attention_layer.default,
            (call.operands["q"], call.operands["k"], call.operands["v"], names[call.operands["layer"]])))

    Raises KeyError for an unknown region and ValueError for one that the graph does not call.
    """
    target = op_of(REGIONS[region])
    operands = [operand_name(declared) for declared in REGIONS[region].operands]
    graph = _copy(module.graph)
    calls = [node for node in graph.nodes if node.target is target]
    if not calls:
        raise ValueError(f"the graph does not call region {region}")
    for node in calls:
        given = {name: node.kwargs[name] for name in operands if name in node.kwargs}
        parameters = {name: value for name, value in node.kwargs.items() if name not in given}
        new = replacement(RegionCall(node.name, given, parameters))
        node.target, node.args, node.kwargs = new.target, new.arguments, dict(new.keywords or {})
    graph.eliminate_dead_code()
    return _module(module, graph, {})


def bind_parameters(module: fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """A graph module with these tensors in place of the inputs of the same (dotted) names; the other inputs stay.

    Every slice of a parameter becomes a view that is made here, once, and shares the parameter's memory: an in-place
    update of the parameter (a weight sync) is seen by the next call. After a parameter is given other memory, bind
    again. The views are plain attributes, not buffers: they are not part of the module's state. Raises BadCheckpoint
    for a name that is no input, for another shape, and where a parameter's layout would make a slice a copy.
    """
    inputs = {node.meta["isojax_name"]: node for node in module.graph.nodes if node.op == "placeholder"}
    unknown = sorted(tensors.keys() - inputs.keys())
    if unknown:
        raise BadCheckpoint(
            field="parameters", found=unknown, allowed=sorted(inputs), reason="The graph has no input of this name."
        )
    for name, tensor in tensors.items():
        _check_shape(name, tuple(tensor.shape), inputs[name].meta["isojax_shape"])
    fixed: dict[fx.Node, Any] = {inputs[name]: tensor.detach() for name, tensor in tensors.items()}
    attributes: dict[str, torch.Tensor] = {}
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}

    def read(source: fx.Node) -> fx.Node:
        if source not in values:
            attributes[source.name] = fixed[source]
            values[source] = graph.create_node("get_attr", source.name, name=source.name)
        return values[source]

    for node in module.graph.nodes:
        if node.target in VIEWS and node.all_input_nodes and all(source in fixed for source in node.all_input_nodes):
            fixed[node] = _view(node, fixed)
        elif node not in fixed:
            values[node] = graph.node_copy(node, read)
    shared_views.add(attributes.values())
    return _module(module, graph, attributes)


def dense_operands(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a bound graph in which every region is given dense operands, as sealed kernels take them.

    What a region returned is dense, and so is a parameter or an input. A slice of a result is not: it is copied here,
    by a node that shows, and that copies nothing where the slice happens to be dense.
    """
    graph = _copy(module.graph)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        # Regions, and the engine's own ops around them.
        if getattr(node.target, "namespace", None) != NAMESPACE:
            continue
        for source in node.all_input_nodes:
            if source.op.startswith("call_") and not _is_result(source):
                if source not in copies:
                    with graph.inserting_after(source):
                        copies[source] = graph.call_method("contiguous", (source,))
                node.replace_input_with(source, copies[source])
    wanted = {node.target for node in graph.nodes if node.op == "get_attr"}
    # Parameters stay plain attributes, as `bind_parameters` left them.
    return _module(module, graph, {name: getattr(module, name) for name in wanted if name not in module._buffers})


def _is_result(node: fx.Node) -> bool:
    """Whether a node is the result of a computation, whole: all of it in another shape is as dense as it is."""
    if node.target in (operator.getitem, torch.reshape):
        return _is_result(node.args[0])  # type: ignore[arg-type]
    return node.target not in VIEWS


def _check_shape(name: str, found: tuple[int, ...], traced: tuple[Any, ...]) -> None:
    if len(found) != len(traced) or any(
        isinstance(size, int) and size != own for own, size in zip(found, traced, strict=True)
    ):
        raise BadCheckpoint(
            field=name, found=found, allowed=traced, reason="The graph was traced for a parameter of another shape."
        )


def _view(node: fx.Node, fixed: Mapping[fx.Node, Any]) -> Any:
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), lambda source: fixed[source])
    result = node.target(*arguments, **keywords)  # type: ignore[operator]
    sources = {_address(fixed[source]) for source in node.all_input_nodes}
    if _address(result) not in sources:
        raise BadCheckpoint(
            field=node.name,
            found="a parameter whose slice is a copy",
            allowed="contiguous parameters",
            reason="A copy would not see the next weight update.",
        )
    return result


def _address(value: Any) -> int:
    tensor = value if isinstance(value, torch.Tensor) else value[0]
    return tensor.untyped_storage().data_ptr()


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    result = copy.graph_copy(graph, {})
    copy.output(result)
    return copy


def _module(source: fx.GraphModule, graph: fx.Graph, attributes: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """A module of the new graph, with the old one's attributes that it still reads and the new ones."""
    wanted = {node.target for node in graph.nodes if node.op == "get_attr"}
    kept = {name: getattr(source, name) for name in wanted if name not in attributes}
    module = fx.GraphModule({**kept, **attributes}, graph, class_name=type(source).__name__)
    for name in attributes:
        tensor = module._buffers.pop(name)
        object.__setattr__(module, name, tensor)
    module.graph.lint()
    return module
