"""A function with one form for XLA:CPU and another for CUDA, of which only the lowered platform's is ever traced."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax

from pallas_kernels.jax_api import Form, Primitive, ShapedArray, batching, lower_form, mlir, result_aval, vary_alike

Static = int | float | bool | str

FORMS: dict[str, dict[str, Form]] = {}
"""By function and platform. Read where a call is lowered."""


def by_platform(name: str, *, cpu: Form, cuda: Form) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns `call(*operands, **static)`, which is `cpu` or `cuda` by the platform that it is lowered for.

    Both take the same arrays and static parameters and return tuples of the same shapes and dtypes; `cpu` says which.
    For backward passes: the call rounds as it likes and has no derivative of its own. A kernel for a card may need a
    JAX that a machine without one does not have, so `cuda` is traced where it is lowered and nowhere else. Lowering
    for another platform raises NotImplementedError.
    """
    primitive = Primitive(f"isojax_{name}")
    primitive.multiple_results = True
    FORMS[name] = {"cpu": cpu, "cuda": cuda}

    @primitive.def_abstract_eval
    def abstract_eval(*avals: ShapedArray, **static: Static) -> list[ShapedArray]:
        operands = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        results = jax.eval_shape(partial(cpu, **static), *operands)
        return [result_aval(result.shape, result.dtype, avals) for result in results]

    @cache
    def compiled(static: tuple[tuple[str, Static], ...]) -> Callable[..., Any]:
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(static)))

    @primitive.def_impl
    def evaluate(*operands: jax.Array, **static: Static) -> Any:
        return compiled(tuple(sorted(static.items())))(*operands)

    def lower(platform: str, context: Any, *operands: Any, **static: Static) -> Any:
        return lower_form(FORMS[name][platform], context, *operands, **static)

    def refuse(context: Any, *operands: Any, **static: Static) -> Any:
        platforms = ", ".join(context.module_context.platforms)
        raise NotImplementedError(f"{name} has no form for platform {platforms}; it has one for cpu and cuda")

    def batch(operands: Sequence[jax.Array], axes: Sequence[int | None], **static: Static) -> Any:
        mapped = [jax.numpy.moveaxis(a, axis, 0) for a, axis in zip(operands, axes, strict=True) if axis is not None]

        def one(members: list[jax.Array]) -> list[jax.Array]:
            remaining = iter(members)
            chosen = [a if axis is None else next(remaining) for a, axis in zip(operands, axes, strict=True)]
            return primitive.bind(*chosen, **static)

        results = jax.lax.map(one, mapped)
        return results, [0] * len(results)

    for platform in FORMS[name]:
        mlir.register_lowering(primitive, partial(lower, platform), platform=platform)
    mlir.register_lowering(primitive, refuse)
    batching.primitive_batchers[primitive] = batch

    def call(*operands: jax.Array, **static: Static) -> tuple[jax.Array, ...]:
        return tuple(primitive.bind(*vary_alike(operands), **static))

    return call
