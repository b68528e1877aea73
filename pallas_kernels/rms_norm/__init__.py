"""The RMSNorm regions: alone, and fused with the residual add before it."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.jax_api import vary_alike
from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rms_norm import cpu, vjp
from pallas_kernels.rms_norm.spec import ADD_SPEC, SPEC
from pallas_kernels.rounding import check_floats


def _check_weight(name: str, x: ShapeAndDtype, w: ShapeAndDtype) -> None:
    check_floats(name, x=x[1], w=w[1])
    if not x[0] or w[0] != (x[0][-1],):
        raise ValueError(f"{name} needs x [..., H] and w [H]; got {x[0]} and {w[0]}")


def _shape_rule(x: ShapeAndDtype, w: ShapeAndDtype, *, eps: float) -> tuple[ShapeAndDtype, ...]:
    _check_weight("rms_norm", x, w)
    return (x,)


def _add_shape_rule(
    x: ShapeAndDtype, residual: ShapeAndDtype, w: ShapeAndDtype, *, eps: float
) -> tuple[ShapeAndDtype, ...]:
    _check_weight("add_rms_norm", x, w)
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
_carried_call = differentiable(ADD_REGION, vjp.sum_backward, lambda operands, results: ())


def rms_norm(x: jax.Array, w_H: jax.Array, *, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * w over the last axis, in x's dtype.

    Source: Zhang and Sennrich 2019, with the rounding of the Hugging Face LlamaRMSNorm. Raises ValueError for shapes.
    """
    return _call(x, w_H, eps=float(eps))


def add_rms_norm(x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """The residual sum x + residual, rounded once, and its RMSNorm: returns (normed, sum), both [T, H]."""
    return _add_call(x_TH, residual_TH, w_H, eps=float(eps))


def add_rms_norm_carried(
    x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`add_rms_norm` at the end of a layer; `norm_gradient` at the start of the next one takes the norm's gradient.

    No gradient flows through the first result, and the backward needs neither operand. So a layer that is computed
    again in the backward need not compute x again, which is a whole product.
    """
    return _carried_call(x_TH, residual_TH, w_H, eps=float(eps))


def norm_gradient(normed_TH: jax.Array, sum_TH: jax.Array, w_H: jax.Array, *, eps: float) -> jax.Array:
    """`normed` itself, the RMSNorm of `sum` by `w`; its gradient goes to those two as if it were computed here."""
    return _with_gradient(float(eps), *vary_alike((normed_TH, sum_TH, w_H)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(eps: float, normed_TH: jax.Array, sum_TH: jax.Array, w_H: jax.Array) -> jax.Array:
    return normed_TH


def _gradient_forward(
    eps: float, normed_TH: jax.Array, sum_TH: jax.Array, w_H: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return normed_TH, (sum_TH, w_H)


def _gradient_backward(
    eps: float, residuals: tuple[jax.Array, jax.Array], cotangent_TH: jax.Array
) -> tuple[jax.Array | None, ...]:
    return None, *vjp.backward(residuals, cotangent_TH, eps=eps)


_with_gradient.defvjp(_gradient_forward, _gradient_backward)
