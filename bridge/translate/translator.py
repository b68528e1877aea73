"""Translates a policy's function, traced with a symbolic token count, into a torch.fx graph of regions and moves."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.extend import core as jax_core
from torch import fx

from bridge.torch_ops import STATIC_OPERANDS, op_of, operand_name
from bridge.translate.emit import Emitter, Value
from bridge.translate.primitives import HANDLERS
from contracts.errors import UncoveredArithmetic
from isojax.jaxprs import scan_parts, user_line
from pallas_kernels.region import is_region, region_of

# Primitives that hold a function to be inlined -> the parameter that holds it.
_CALLS: dict[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
}


def translate(function: Callable[..., Any], *example_arguments: Any, device: str = "cpu") -> fx.GraphModule:
    """The function's forward as a `torch.fx.GraphModule`, with every scan unrolled and every call inlined.

    `example_arguments` are pytrees of arrays or `jax.ShapeDtypeStruct`s; sizes may be symbols of
    `jax.export.symbolic_shape`, each of which must be a whole dimension of some input. The module takes one tensor per
    leaf, by name: a leaf of a dict is called by its key with dots as underscores (`layers.qkv` -> `layers_qkv`),
    another argument by its own name. It returns one tensor or a tuple, in the order of the function's results.

    A region becomes a call of `torch.ops.isojax.<region>` with its operands by name, static parameters by value, and an
    operand that is constant after unrolling (`layer` of attention) as a plain integer. Everything else must be a move
    (see `bridge.translate.primitives`); otherwise this raises UncoveredArithmetic, which names the primitive, the
    source line and the shapes.
    """
    traced = jax.jit(function).trace(*example_arguments)
    emitter = Emitter(torch.device(device))
    translation = _Translation(emitter)
    closed = traced.jaxpr
    inputs: list[fx.Node] = []
    leaves = jax.tree_util.tree_flatten_with_path(example_arguments)[0]
    for (path, _), variable in zip(leaves, closed.jaxpr.invars, strict=True):
        placeholder = emitter.graph.placeholder(_input_name(function, path))
        placeholder.meta["isojax_name"] = _leaf_name(function, path)
        placeholder.meta["isojax_shape"] = tuple(variable.aval.shape)
        inputs.append(placeholder)
    _refuse_equal_names(emitter.graph)
    for placeholder in inputs:
        emitter.dimensions.read_from(placeholder, placeholder.meta["isojax_shape"])
    results = [emitter.node(value) for value in translation.run(closed.jaxpr, closed.consts, inputs)]
    emitter.graph.output(results[0] if len(results) == 1 else tuple(results))
    emitter.graph.eliminate_dead_code()
    module = fx.GraphModule(dict(emitter.constants), emitter.graph, class_name=_class_name(function))
    module.graph.lint()
    return module


class _Translation:
    """Walks jaxprs and keeps what each variable became."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._line = "an unknown source line"

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        """Emits a jaxpr's equations; returns what its results became."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        known.update(zip(jaxpr.constvars, (np.asarray(constant) for constant in constants), strict=True))

        def read(atom: Any) -> Value:
            return _literal(atom) if isinstance(atom, jax_core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """What one equation's results become."""
        name = equation.primitive.name
        self._line = user_line(equation) or self._line
        if is_region(equation.primitive):
            return self.region(equation, operands)
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            jaxpr, constants = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(jaxpr, constants, operands)
        if name == "scan":
            return self.scan(equation, operands)
        if name in HANDLERS:
            if _is_known_now(equation, operands):
                return _evaluate(equation, operands)
            results = HANDLERS[name](self.emitter, equation, operands)
            if results is not None:
                return results
        raise self.uncovered(equation)

    def uncovered(self, equation: Any) -> UncoveredArithmetic:
        """The refusal of an equation, with its own source line or that of the call it came in with."""
        shapes = ", ".join(variable.aval.str_short() for variable in equation.invars)
        return UncoveredArithmetic(
            field="primitive",
            found=f"{equation.primitive.name} on {shapes} at {self._line}",
            allowed="regions, and moves: reshape, transpose, slice, split, concatenate, gather of whole rows, "
            "broadcast, select, pad, iota, integer arithmetic",
            reason="It is neither a region nor data movement that the engine can repeat exactly.",
        )

    def region(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """A call of the region's op."""
        region = region_of(equation.primitive)
        arguments: dict[str, Any] = {}
        for declared, operand in zip(region.operands, operands, strict=False):
            name = operand_name(declared)
            if name not in STATIC_OPERANDS:
                arguments[name] = self.emitter.node(operand)
            elif isinstance(operand, np.ndarray):
                arguments[name] = int(operand)
            else:
                raise UncoveredArithmetic(
                    field=f"{region.name}.{name}",
                    found="a value computed at run time",
                    allowed="a constant, or a scan's own counter",
                    reason="The engine needs it as a plain integer in the unrolled graph.",
                )
        results = self.emitter.call(op_of(region), name=region.name, **arguments, **equation.params)
        if len(region.results) == 1:
            return [results]
        return self.emitter.items(results, [f"{region.name}_{result}" for result in region.results])

    def scan(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        """Every trip of a scan after the other, its stacked operands sliced."""
        parameters = equation.params
        body, length = parameters["jaxpr"], parameters["length"]
        constants, carries = scan_parts(equation)
        fixed, carried = operands[:constants], operands[constants : constants + carries]
        stacked = operands[len(fixed) + len(carried) :]
        if not isinstance(length, int) or not length:
            raise self.uncovered(equation)
        collected: list[list[Value]] = []
        for trip in reversed(range(length)) if parameters["reverse"] else range(length):
            with self.emitter.prefix(f"layers_{trip}_"):
                slices = [self.slice(operand, trip) for operand in stacked]
                results = self.run(body.jaxpr, body.consts, [*fixed, *carried, *slices])
            carried = results[: len(carried)]
            collected.append(results[len(carried) :])
        if parameters["reverse"]:
            collected.reverse()
        return [*carried, *(self.stack(list(parts)) for parts in zip(*collected, strict=True))]

    def slice(self, operand: Value, trip: int) -> Value:
        """Row `trip` of a stacked operand: a view."""
        if isinstance(operand, np.ndarray):
            return np.asarray(operand[trip])
        return self.emitter.trip(operand, trip)

    def stack(self, parts: list[Value]) -> Value:
        """The results of every trip along a new first axis."""
        if all(isinstance(part, np.ndarray) for part in parts):
            return np.stack(parts)  # type: ignore[arg-type]
        return self.emitter.call(torch.stack, [self.emitter.node(part) for part in parts], 0, name="stack")


def _literal(atom: Any) -> np.ndarray:
    return np.asarray(atom.val, atom.aval.dtype)


def _is_known_now(equation: Any, operands: list[Value]) -> bool:
    """Whether a move has integer constants as operands and a fixed size: a slice of the layer numbers, say."""
    return (
        bool(operands)
        and all(isinstance(operand, np.ndarray) and operand.dtype.kind in "iub" for operand in operands)
        and all(isinstance(size, int) for variable in equation.outvars for size in variable.aval.shape)
    )


def _evaluate(equation: Any, operands: list[Value]) -> Sequence[Value]:
    results = equation.primitive.bind(*operands, **equation.params)
    return [np.asarray(result) for result in (results if equation.primitive.multiple_results else [results])]


def _leaf_name(function: Callable[..., Any], path: Sequence[Any]) -> str:
    argument = list(inspect.signature(function).parameters)[path[0].idx]
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path[1:]]
    return ".".join(keys) if keys else argument


def _input_name(function: Callable[..., Any], path: Sequence[Any]) -> str:
    return _leaf_name(function, path).replace(".", "_")


def _refuse_equal_names(graph: fx.Graph) -> None:
    names = [node.meta["isojax_name"] for node in graph.nodes if node.op == "placeholder"]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two inputs of the function have the same name: {', '.join(twice)}; rename the keys")


def _class_name(function: Callable[..., Any]) -> str:
    return "".join(part.capitalize() for part in getattr(function, "__name__", "policy").split("_") if part.isalpha())
