"""The parts of JAX that regions need and that moved between versions, in one place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.core import ManualAxisType
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

__all__ = ["Form", "Primitive", "ShapedArray", "batching", "lower_form", "mlir", "result_aval", "vary_alike"]

Form = Callable[..., tuple[jax.Array, ...]]
"""Arrays and static parameters in, a tuple of arrays out."""


def result_aval(shape: tuple[object, ...], dtype: object, operands: Sequence[ShapedArray]) -> ShapedArray:
    """The abstract value of a region's result: it varies over every mesh axis that any operand varies over."""
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in operands))
    if not varying:
        return ShapedArray(shape, dtype)
    # JAX takes the mesh of the axes from the sharding, which inside of a fully manual shard_map names no axis itself.
    marked = next(aval for aval in operands if not aval.manual_axis_type.empty)
    sharding = marked.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=varying))


def lower_form(form: Form, context: Any, *operands: Any, **static: Any) -> Any:
    """A primitive's lowering to what `form` is made of. Inside of one there is only one device's part of an array."""
    local = context.replace(
        avals_in=[ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in],
        avals_out=[ShapedArray(aval.shape, aval.dtype) for aval in context.avals_out],
    )
    return mlir.lower_fun(form, multiple_results=True)(local, *operands, **static)


def vary_alike(operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Marks every operand as varying over the union of their `shard_map` axes.

    The mark's transpose is the sum over those axes, so a replicated weight beside sharded rows gets its whole gradient.
    """
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(operand, tuple(sorted(union - own)), to="varying") if union - own else operand
        for operand, own in zip(operands, varying, strict=True)
    )
