"""Runs a traceable function and keeps what every region in it returned, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from isojax.jaxprs import Jaxpr, JaxprEqn, scan_parts
from isojax.policy.batch import PackedBatch
from isojax.policy.policy import Policy
from pallas_kernels.region import is_region, region_of

# Calls whose body is evaluated in place. A scan keeps its loop, so that a layer runs as it does in training.
_BODIES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass(frozen=True)
class RegionOutput:
    """What one region returned. layer: the scan step that it ran in, None outside of the layers."""

    region: str
    layer: int | None
    results: tuple[np.ndarray, ...]

    def __str__(self) -> str:
        return self.region if self.layer is None else f"{self.region} of layer {self.layer}"


def capture(function: Callable[..., Any]) -> Callable[..., list[RegionOutput]]:
    """A function of the same arguments, compiled as one program, that returns what every region in it returned.

    Regions come in the order in which they run; scans (the layers) stay loops, and their regions come once a step.
    Raises NotImplementedError for a `while`, `cond` or `shard_map`, which a policy's forward on one device has not.
    """
    return _capture(function, jax.jit, jax.lax.scan)


def capture_apart(function: Callable[..., Any]) -> Callable[..., list[RegionOutput]]:
    """Like `capture`, but every region runs as a program of its own, without a neighbour to be fused with."""
    return _capture(function, lambda run: run, _loop)


def _capture(
    function: Callable[..., Any], compiled: Callable[..., Any], scan: Callable[..., Any]
) -> Callable[..., list[RegionOutput]]:
    sites: list[_Site] = []

    @compiled
    def run(*args: Any) -> list[Any]:
        closed = jax.make_jaxpr(function)(*args)
        _, calls = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), scan)
        # The same for every shape of the arguments, so it may come from an earlier trace.
        sites[:] = [site for site, _ in calls]
        return [values for _, values in calls]

    return lambda *args: list(_in_order(sites, jax.device_get(run(*args))))


def capture_forward(policy: Policy, params: Mapping[str, jax.Array], batch: PackedBatch) -> list[RegionOutput]:
    """Every region of the policy's forward on a packed batch, the head's full rows last (at temperature 1)."""
    return _captured_forward(policy, capture)(dict(params), policy.buffers, PackedBatch(*map(jnp.asarray, batch)))


def capture_forward_apart(policy: Policy, params: Mapping[str, jax.Array], batch: PackedBatch) -> list[RegionOutput]:
    """The same with every region as a program of its own, which is how an engine calls them."""
    forward = _captured_forward(policy, capture_apart)
    return forward(dict(params), policy.buffers, PackedBatch(*map(jnp.asarray, batch)))


def forward_program(policy: Policy) -> list[tuple[str, int | None]]:
    """Region and layer of every call of that forward in the order in which they run, without running it."""
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    batch = PackedBatch(ids, ids, ids, ids, jax.ShapeDtypeStruct((1,), jnp.bool_))
    closed = jax.make_jaxpr(_forward(policy))(policy.parameter_shapes, policy.buffers, batch)
    program: list[tuple[str, int | None]] = []

    def run(*operands: jax.Array) -> None:
        _, calls = _evaluate(closed.jaxpr, closed.consts, operands, jax.lax.scan)
        program.extend(_program([site for site, _ in calls]))

    jax.eval_shape(run, *closed.in_avals)
    return program


def _forward(policy: Policy) -> Callable[..., jax.Array]:
    def forward(params: Mapping[str, jax.Array], buffers: Mapping[str, jax.Array], batch: Any) -> jax.Array:
        hidden = policy.hidden(params, buffers, batch.tokens, batch.positions, batch.segment_ids)
        return policy.head_rows(params, hidden, 1.0)

    return forward


@lru_cache(maxsize=8)
def _captured_forward(policy: Policy, how: Callable[..., Any]) -> Callable[..., list[RegionOutput]]:
    return how(_forward(policy))


def first_non_finite(outputs: Sequence[RegionOutput], rows: int | None = None) -> tuple[RegionOutput, int] | None:
    """The first region with a NaN or infinite result, and the row (of axis 0) where; None if all are finite.

    rows: how many of the first rows are looked at, where the ones behind are padding.
    """
    for output in outputs:
        for result in output.results:
            bad = ~np.isfinite(result[:rows].astype(np.float32)).reshape(len(result[:rows]), -1).all(axis=1)
            if bad.any():
                return output, int(np.flatnonzero(bad)[0])
    return None


@dataclass(frozen=True)
class _Site:
    """A region's call, or a scan with the sites of its body and how often it runs."""

    region: str | None
    body: tuple[_Site, ...] = ()
    steps: int = 1


_Calls = list[tuple[_Site, Any]]


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], scan: Callable[..., Any]
) -> tuple[list[Any], _Calls]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    calls: _Calls = []

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        results, inner = _evaluate_equation(equation, [read(variable) for variable in equation.invars], scan)
        calls.extend(inner)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars], calls


def _evaluate_equation(
    equation: JaxprEqn, operands: list[Any], scan: Callable[..., Any]
) -> tuple[Sequence[Any], _Calls]:
    primitive, parameters = equation.primitive, equation.params
    if is_region(primitive):
        results = primitive.bind(*operands, **parameters)
        return results, [(_Site(region_of(primitive).name), results)]
    if primitive.name == "scan":
        return _evaluate_scan(equation, operands, scan)
    if primitive.name in _BODIES:
        body = parameters[_BODIES[primitive.name]]
        # remat holds an open jaxpr, the others closed ones.
        consts, body = (body.consts, body.jaxpr) if hasattr(body, "consts") else ((), body)
        return _evaluate(body, consts, operands, scan)
    if primitive.name in ("while", "cond", "shard_map"):
        raise NotImplementedError(f"regions inside of {primitive.name} are not captured")
    results = primitive.bind(*operands, **parameters)
    return results if primitive.multiple_results else [results], []


def _evaluate_scan(equation: JaxprEqn, operands: list[Any], scan: Callable[..., Any]) -> tuple[Sequence[Any], _Calls]:
    parameters = equation.params
    body, (constants, carried) = parameters["jaxpr"], scan_parts(equation)
    sites: list[_Site] = []

    def step(carry: Sequence[Any], slices: Sequence[Any]) -> tuple[Any, Any]:
        outputs, calls = _evaluate(body.jaxpr, body.consts, [*operands[:constants], *carry, *slices], scan)
        sites[:] = [site for site, _ in calls]
        return outputs[:carried], (outputs[carried:], [values for _, values in calls])

    carry, (stacked, values) = scan(
        step,
        operands[constants : constants + carried],
        operands[constants + carried :],
        length=parameters["length"],
        reverse=parameters["reverse"],
    )
    return [*carry, *stacked], [(_Site(None, tuple(sites), parameters["length"]), values)]


def _program(sites: Sequence[_Site], layer: int | None = None) -> Iterator[tuple[str, int | None]]:
    for site in sites:
        if site.region is not None:
            yield site.region, layer
            continue
        for step in range(site.steps):
            yield from _program(site.body, step)


def _loop(step: Callable[..., Any], carry: Any, stacked: Any, *, length: int, reverse: bool) -> tuple[Any, Any]:
    """`jax.lax.scan` as a loop in Python."""
    results = []
    for index in reversed(range(length)) if reverse else range(length):
        carry, result = step(carry, jax.tree.map(lambda array, index=index: array[index], stacked))
        results.append(result)
    return carry, jax.tree.map(lambda *arrays: jnp.stack(arrays), *(results[::-1] if reverse else results))


def _in_order(sites: Sequence[_Site], values: Sequence[Any], layer: int | None = None) -> Iterator[RegionOutput]:
    for site, results in zip(sites, values, strict=True):
        if site.region is not None:
            yield RegionOutput(site.region, layer, tuple(np.asarray(result) for result in results))
            continue
        for step in range(site.steps):
            yield from _in_order(site.body, [[array[step] for array in call] for call in results], step)
