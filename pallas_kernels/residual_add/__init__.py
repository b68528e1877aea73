"""The residual add region."""

import jax

from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.residual_add import cpu, vjp
from pallas_kernels.residual_add.spec import SPEC


def _shape_rule(x: ShapeAndDtype, residual: ShapeAndDtype) -> tuple[ShapeAndDtype, ...]:
    if x != residual or len(x[0]) != 2:
        raise ValueError(f"residual_add needs two operands of one shape [T, H] and dtype; got {x} and {residual}")
    return (x,)


REGION = Region(
    name="residual_add",
    operands=("x", "residual"),
    parameters={},
    results=("sum",),
    shape_rule=_shape_rule,
    cpu=cpu.residual_add,
    spec=SPEC,
)
_call = differentiable(REGION, vjp.backward, vjp.keep)


def residual_add(x_TH: jax.Array, residual_TH: jax.Array) -> jax.Array:
    """x + residual, [T, H], rounded once to their dtype. Raises ValueError unless shape and dtype are equal."""
    return _call(x_TH, residual_TH)
