"""The region mechanism: a declaration with a rounding schedule, one JAX primitive, one lowering a platform."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import counters
from pallas_kernels.jax_api import Form, Primitive, ShapedArray, batching, lower_form, mlir, result_aval, vary_alike

Parameter = int | float | bool | str
ShapeAndDtype = tuple[tuple[Any, ...], np.dtype]
ShapeRule = Callable[..., tuple[ShapeAndDtype, ...]]
Forward = Callable[[tuple[jax.Array, ...], Mapping[str, Parameter]], tuple[Any, Any]]

REGIONS: dict[str, "Region"] = {}


@dataclass(frozen=True)
class Spec:
    """What a region computes and how it rounds, in words and constants that a contract can hold."""

    version: str
    operations: tuple[str, ...]
    rounding: tuple[str, ...]
    constants: Mapping[str, int | float | str]
    hazards: tuple[str, ...]
    cases: tuple[str, ...] = counters.CASES


@dataclass(frozen=True, eq=False)
class Region:
    """One declared operation. Creating it registers it in `REGIONS` and makes its primitive.

    `operands` are names in order; a trailing "?" marks an optional one, and optional ones form the tail. `parameters`
    maps a name to its type. `shape_rule(*(shape, dtype), **parameters)` returns one (shape, dtype) per result and
    raises ValueError on wrong operands; sizes may be ints, JAX symbolic dimensions or torch SymInts. `cpu` is the
    form for XLA:CPU: arrays and parameters in, a tuple of arrays out. `updates` are results, the last ones, that an
    operand of the same name becomes: kernels and torch ops write it in place, JAX returns a new array. `cuda` is a
    trainer's form on a card, of operations whose bits XLA defines, for a region that is not sealed; else there are
    kernels.
    """

    name: str
    operands: tuple[str, ...]
    parameters: Mapping[str, type]
    results: tuple[str, ...]
    shape_rule: ShapeRule
    cpu: Form
    spec: Spec
    updates: tuple[str, ...] = ()
    cuda: Form | None = None
    primitive: Primitive = field(init=False)

    def __post_init__(self) -> None:
        if self.updates != self.results[len(self.returned) :] or not set(self.updates) <= set(self.operands):
            raise ValueError(f"region {self.name}: updates {self.updates} are not its last results and operands too")
        if self.name in REGIONS:
            raise ValueError(f"region {self.name} is declared twice")
        object.__setattr__(self, "primitive", _make_primitive(self))
        REGIONS[self.name] = self

    @property
    def version(self) -> str:
        """The version of the rounding schedule; a contract pins it."""
        return self.spec.version

    @property
    def returned(self) -> tuple[str, ...]:
        """The results that are new arrays everywhere."""
        return tuple(name for name in self.results if name not in self.updates)

    @property
    def required_operands(self) -> int:
        """How many operands must be given."""
        return sum(not name.endswith("?") for name in self.operands)

    def bind(self, *operands: jax.Array, **parameters: Parameter) -> Any:
        """Calls the region: one array for a single result, a tuple for several.

        Raises TypeError for a wrong operand count or parameter, ValueError for wrong shapes or dtypes.
        """
        self.check_call(len(operands), parameters)
        results = self.primitive.bind(*vary_alike(operands), **parameters)
        return results[0] if len(self.results) == 1 else tuple(results)

    def check_call(self, operand_count: int, parameters: Mapping[str, Parameter]) -> None:
        """Raises TypeError unless the operand count and every parameter's name and type are as declared."""
        if not self.required_operands <= operand_count <= len(self.operands):
            raise TypeError(f"region {self.name} takes operands {', '.join(self.operands)}; got {operand_count}")
        if set(parameters) != set(self.parameters):
            raise TypeError(f"region {self.name} takes parameters {sorted(self.parameters)}; got {sorted(parameters)}")
        for name, kind in self.parameters.items():
            if type(parameters[name]) is not kind:
                found = type(parameters[name]).__name__
                raise TypeError(f"region {self.name}: parameter {name} must be {kind.__name__}; got {found}")

    def result_types(self, *operands: ShapeAndDtype, **parameters: Parameter) -> tuple[ShapeAndDtype, ...]:
        """Shape and dtype of every result; see `shape_rule`."""
        self.check_call(len(operands), parameters)
        return self.shape_rule(*operands, **parameters)


def is_region(primitive: Primitive) -> bool:
    """Whether a primitive of a jaxpr is a region."""
    return any(region.primitive is primitive for region in REGIONS.values())


def region_of(primitive: Primitive) -> Region:
    """The region of a primitive; KeyError for any other primitive."""
    for region in REGIONS.values():
        if region.primitive is primitive:
            return region
    raise KeyError(f"{primitive} is not a region")


def differentiable(
    region: Region,
    backward: Callable[..., tuple[jax.Array | None, ...]],
    keep: Callable[[tuple[Any, ...], Any], Any] = lambda operands, results: operands,
    forward: Forward | None = None,
) -> Callable[..., Any]:
    """Wraps `region.bind` in a custom VJP and returns `call(*operands, **parameters)`.

    `keep(operands, results)` chooses the residuals. `backward(residuals, cotangents, **parameters)` returns one
    cotangent per operand in the operand's dtype, None for integers; it is plain JAX and not bound by the rounding
    schedule. Under gradients the results are named after the region, so that `jax.checkpoint_policies` can save them.
    `forward(operands, parameters)` returns (results, residuals) under differentiation, where that is not the region
    itself: other regions whose results have the same bits, as where the backward needs what is between them.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(parameters: tuple[tuple[str, Parameter], ...], *operands: jax.Array) -> Any:
        return region.bind(*operands, **dict(parameters))

    def differentiated(parameters: tuple[tuple[str, Parameter], ...], *operands: jax.Array) -> tuple[Any, Any]:
        if forward is not None:
            return forward(operands, dict(parameters))
        # Named before they are kept, so that a saved result and a saved residual are one array.
        named = partial(checkpoint_name, name=region.name)
        results = jax.tree.map(named, region.bind(*operands, **dict(parameters)))
        return results, keep(operands, results)

    def reverse(parameters: tuple[tuple[str, Parameter], ...], residuals: Any, cotangents: Any) -> Any:
        return backward(residuals, cotangents, **dict(parameters))

    call.defvjp(differentiated, reverse)

    def public(*operands: jax.Array, **parameters: Parameter) -> Any:
        # Outside of the custom VJP, so that JAX itself transposes the marks of shard_map.
        return call(tuple(sorted(parameters.items())), *vary_alike(operands))

    return public


def _make_primitive(region: Region) -> Primitive:
    primitive = Primitive(f"isojax_{region.name}")
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def abstract_eval(*avals: ShapedArray, **parameters: Parameter) -> list[ShapedArray]:
        types = region.result_types(*((aval.shape, aval.dtype) for aval in avals), **parameters)
        return [result_aval(shape, dtype, avals) for shape, dtype in types]

    @cache
    def compiled(parameters: tuple[tuple[str, Parameter], ...]) -> Callable[..., Any]:
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(parameters)))

    @primitive.def_impl
    def evaluate(*operands: jax.Array, **parameters: Parameter) -> Any:
        # Op-by-op execution gives other bits than a compiled region, so an eager call is compiled as well.
        return compiled(tuple(sorted(parameters.items())))(*operands)

    def lower_on_cpu(context: Any, *operands: Any, **parameters: Parameter) -> Any:
        counters.record_installed(region.name)
        return lower_form(region.cpu, context, *operands, **parameters)

    def refuse(context: Any, *operands: Any, **parameters: Parameter) -> Any:
        platforms = ", ".join(context.module_context.platforms)
        raise NotImplementedError(
            f"region {region.name} has no form for platform {platforms}; it has one for cpu and cuda"
        )

    def lower_on_cuda(context: Any, *operands: Any, **parameters: Parameter) -> Any:
        counters.record_installed(region.name)
        if region.cuda is not None:
            return lower_form(region.cuda, context, *operands, **parameters)
        # Imported here: a CPU-only process needs no kernel for a card.
        from pallas_kernels import hopper_regions

        return hopper_regions.lower_on_cuda(region, context, operands, parameters)

    def batch(operands: Sequence[jax.Array], axes: Sequence[int | None], **parameters: Parameter) -> Any:
        # One member after the other: a batched region would have other tiles, and so other bits.
        mapped = [
            jax.numpy.moveaxis(operand, axis, 0)
            for operand, axis in zip(operands, axes, strict=True)
            if axis is not None
        ]

        def one(members: list[jax.Array]) -> list[jax.Array]:
            remaining = iter(members)
            chosen = [
                operand if axis is None else next(remaining) for operand, axis in zip(operands, axes, strict=True)
            ]
            return primitive.bind(*chosen, **parameters)

        results = jax.lax.map(one, mapped)
        return results, [0] * len(results)

    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")
    mlir.register_lowering(primitive, lower_on_cuda, platform="cuda")
    mlir.register_lowering(primitive, refuse)
    batching.primitive_batchers[primitive] = batch
    return primitive
