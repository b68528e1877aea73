"""The RMSNorm regions: alone, and fused with the residual add before it."""

import jax
import jax.numpy as jnp

from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rms_norm import cpu, vjp
from pallas_kernels.rms_norm.spec import ADD_SPEC, SPEC


def _check_weight(name: str, x_shape: tuple[object, ...], w_shape: tuple[object, ...]) -> None:
    if not x_shape or w_shape != (x_shape[-1],):
        raise ValueError(f"{name} needs x [..., H] and w [H]; got {x_shape} and {w_shape}")


def _shape_rule(x: ShapeAndDtype, w: ShapeAndDtype, *, eps: float) -> tuple[ShapeAndDtype, ...]:
    _check_weight("rms_norm", x[0], w[0])
    return (x,)


def _add_shape_rule(
    x: ShapeAndDtype, residual: ShapeAndDtype, w: ShapeAndDtype, *, eps: float
) -> tuple[ShapeAndDtype, ...]:
    _check_weight("add_rms_norm", x[0], w[0])
    if x != residual or len(x[0]) != 2:
        raise ValueError(f"add_rms_norm needs x and residual of one shape [T, H] and dtype; got {x} and {residual}")
    return (x, x)


REGION = Region(
    name="rms_norm",
    operands=("x", "w"),
    parameters={"eps": float},
    results=("normed",),
    shape_rule=_shape_rule,
    cpu=cpu.rms_norm,
    spec=SPEC,
)
ADD_REGION = Region(
    name="add_rms_norm",
    operands=("x", "residual", "w"),
    parameters={"eps": float},
    results=("normed", "sum"),
    shape_rule=_add_shape_rule,
    cpu=cpu.add_rms_norm,
    spec=ADD_SPEC,
)
_call = differentiable(REGION, vjp.backward)


def _keep_sum(operands: tuple[jax.Array, ...], results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    x_TH, residual_TH, w_H = operands
    return results[1], w_H, jnp.zeros((0,), x_TH.dtype), jnp.zeros((0,), residual_TH.dtype)


_add_call = differentiable(ADD_REGION, vjp.add_backward, _keep_sum)


def rms_norm(x: jax.Array, w_H: jax.Array, *, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * w over the last axis, in x's dtype.

    Source: Zhang and Sennrich 2019, with the rounding of the Hugging Face LlamaRMSNorm. Raises ValueError for shapes.
    """
    return _call(x, w_H, eps=float(eps))


def add_rms_norm(x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """The residual sum x + residual, rounded once, and its RMSNorm: returns (normed, sum), both [T, H]."""
    return _add_call(x_TH, residual_TH, w_H, eps=float(eps))
