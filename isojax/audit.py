"""Prove that a function rounds only inside regions: walk its jaxpr and refuse everything that is not a move."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh

from contracts.errors import UncoveredArithmetic
from isojax.jaxprs import Jaxpr, JaxprEqn, closed_jaxprs, context_of, forward_rule, jvp_rule, manual_axes, user_line
from pallas_kernels.region import is_region, region_of

# Data goes elsewhere and keeps its bits, whatever its dtype. A plain pad writes a given value, so it is a move too.
MOVES = frozenset(
    (
        *("reshape", "transpose", "squeeze", "expand_dims", "rev", "broadcast_in_dim", "copy", "copy_p", "pad"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "split", "concatenate", "stack", "unstack", "tile"),
        *("gather", "select_n"),
        *("all_gather", "all_gather_invariant", "all_to_all", "ppermute", "pvary", "pcast"),
        *("sharding_constraint", "optimization_barrier", "stop_gradient", "name"),
    )
)
# Exact on integers and booleans; on floats each of them rounds, compares or reorders.
INTEGER_ARITHMETIC = frozenset(
    (
        *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "clamp", "integer_pow", "square"),
        *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("eq", "ne", "lt", "le", "gt", "ge", "convert_element_type", "iota", "axis_index", "dim_as_value"),
        *("cumsum", "cummax", "cummin", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"),
        *("argmax", "argmin", "sort", "scatter", "scatter-add", "population_count", "clz"),
    )
)
# Their own work is control: what they compute is in the jaxprs that they hold.
_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "scan", "while", "cond", "shard_map"),
    )
)


class RegionCall(NamedTuple):
    """One call site of a region: its name, the parameters it is called with, and (shape, dtype) of every operand."""

    region: str
    parameters: Mapping[str, int | float | bool | str]
    operands: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class AuditReport:
    """What an audited function is made of. Counts are call sites: a scan's body counts once.

    calls: every call site of a region in program order. differentiated: the same under gradients, where the forward
    rules of custom derivatives run instead of the functions. moves: sites by primitive, integer arithmetic included.
    """

    calls: tuple[RegionCall, ...]
    differentiated: tuple[RegionCall, ...]
    moves: Mapping[str, int]

    @property
    def sequence(self) -> tuple[str, ...]:
        """Region names in program order."""
        return tuple(call.region for call in self.calls)

    @property
    def regions(self) -> dict[str, int]:
        """Call sites by region name."""
        return dict(Counter(self.sequence))


@dataclass
class _Walk:
    mesh: Mesh | AbstractMesh | None
    # Whether rules are entered: JAX runs custom derivatives inside of a forward rule in their primal form.
    forward_rules: bool = True
    moves: Counter[str] = field(default_factory=Counter)
    calls: list[RegionCall] = field(default_factory=list)
    differentiated: list[RegionCall] = field(default_factory=list)


def audit(fn: Callable[..., Any], *args: Any, mesh: Mesh | AbstractMesh | None = None) -> AuditReport:
    """Trace `fn(*args)` and prove that every floating-point operation in it is a region.

    args: arrays, `jax.ShapeDtypeStruct`s or pytrees of them. Scans, loops, branches, remat, jit, shard_map and custom
    derivatives are entered; of a custom VJP the forward rule and of a custom JVP what its rule returns as results are
    audited as well, since they are what runs under gradients.
    With a mesh, each region must also lie inside of shard_maps that make every axis of it manual: under automatic
    sharding XLA would gather the batch in front of a region and compute everything everywhere.

    Raises `UncoveredArithmetic` naming the first offending primitive, its source line, shape and dtype.
    """
    walk = _Walk(mesh)
    _visit(jax.make_jaxpr(fn)(*args).jaxpr, walk, manual=frozenset(), callers=())
    return AuditReport(tuple(walk.calls), tuple(walk.differentiated), dict(walk.moves))


def _visit(jaxpr: Jaxpr, walk: _Walk, manual: frozenset[str], callers: tuple[JaxprEqn, ...]) -> None:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        path = (equation, *callers)
        if is_region(equation.primitive):
            call = _region_call(path, walk, manual)
            walk.calls.append(call)
            walk.differentiated.append(call)
        elif name in _CALLS:
            inner = manual | manual_axes(equation) if name == "shard_map" else manual
            before = len(walk.differentiated)
            with context_of(equation):
                for body in closed_jaxprs(equation):
                    _visit(body, walk, inner, path)
            if walk.forward_rules and name in ("custom_vjp_call", "custom_jvp_call"):
                walk.differentiated[before:] = _calls_of_rule(path, walk, inner)
        elif name in MOVES or (name in INTEGER_ARITHMETIC and not _touches_floats(equation)):
            walk.moves[name] += 1
        elif name == "convert_element_type" and _dtype(equation.invars[0].aval) == equation.params["new_dtype"]:
            # A Python scalar becoming an array of the dtype it already has.
            walk.moves[name] += 1
        else:
            raise _uncovered(path)


def _calls_of_rule(path: tuple[JaxprEqn, ...], walk: _Walk, manual: frozenset[str]) -> list[RegionCall]:
    """Audit what a custom derivative's rule computes for its results, which replace the function's under gradients.

    Its residuals and tangents serve the backward alone. Returns the regions that it calls.
    """
    equation = path[0]
    results = [True] * len(equation.outvars)
    if equation.primitive.name == "custom_vjp_call":
        rule = forward_rule(equation)
        used = [False] * (len(rule.outvars) - len(results)) + results
    else:
        rule = jvp_rule(equation)
        used = results + [False] * (len(rule.outvars) - len(results))
    needed, _ = partial_eval.dce_jaxpr(rule, used)
    inner = _Walk(walk.mesh, forward_rules=False)
    _visit(needed, inner, manual, path)
    return inner.calls


def _region_call(path: tuple[JaxprEqn, ...], walk: _Walk, manual: frozenset[str]) -> RegionCall:
    region = region_of(path[0].primitive)
    if walk.mesh is not None and (automatic := [axis for axis in walk.mesh.axis_names if axis not in manual]):
        raise UncoveredArithmetic(
            field=f"region {region.name}",
            found=f"mesh axes {automatic} not manual at {_place(path)}",
            allowed="a shard_map over all mesh axes around every region",
            reason="Under automatic sharding XLA gathers the whole batch in front of a region.",
        )
    avals: list[Any] = [variable.aval for variable in path[0].invars]
    operands = tuple((tuple(aval.shape), str(aval.dtype)) for aval in avals)
    return RegionCall(region.name, dict(path[0].params), operands)


def _touches_floats(equation: JaxprEqn) -> bool:
    return any(_is_inexact(variable.aval) for variable in (*equation.invars, *equation.outvars))


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", None)


def _is_inexact(aval: Any) -> bool:
    dtype = _dtype(aval)
    return dtype is None or not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))


def _place(path: tuple[JaxprEqn, ...]) -> str:
    """Source lines from the operation outwards: a jitted helper is traced once, so its own line may be another's."""
    lines = dict.fromkeys(line for equation in path if (line := user_line(equation)) is not None)
    return ", called from ".join(lines) or "an unknown line"


def _uncovered(path: tuple[JaxprEqn, ...]) -> UncoveredArithmetic:
    equation = path[0]

    def types(variables: list[Any]) -> str:
        return ", ".join(variable.aval.str_short(short_dtypes=False) for variable in variables)

    name = equation.primitive.name
    cast = " (a cast between dtypes rounds)" if name == "convert_element_type" else ""
    return UncoveredArithmetic(
        field=name,
        found=f"{types(equation.invars)} -> {types(equation.outvars)} at {_place(path)}",
        allowed="regions, data movement and integer arithmetic",
        reason=f"Outside of a region its rounding is the compiler's choice{cast}, so two executors may differ.",
    )
