"""The gated matmul region: gate and up projections of the same rows, and SwiGLU of both."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.gated_matmul import cpu, vjp
from pallas_kernels.gated_matmul.spec import SPEC
from pallas_kernels.matmul import REGION as MATMUL
from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rounding import check_floats
from pallas_kernels.swiglu import REGION as SWIGLU


def _shape_rule(x: ShapeAndDtype, w: ShapeAndDtype) -> tuple[ShapeAndDtype, ...]:
    (x_shape, x_dtype), (w_shape, w_dtype) = x, w
    check_floats("gated_matmul", x=x_dtype, w=w_dtype)
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1] or w_shape[0] % 2:
        raise ValueError(f"gated_matmul needs x [T, K] and w [2 I, K]; got {x_shape} and {w_shape}")
    return (((x_shape[0], w_shape[0] // 2), x_dtype),)


REGION = Region(
    name="gated_matmul",
    operands=("x", "w"),
    parameters={},
    results=("y",),
    shape_rule=_shape_rule,
    cpu=cpu.gated_matmul,
    spec=SPEC,
)


def _forward(operands: tuple[jax.Array, ...], parameters: Any) -> tuple[jax.Array, Any]:
    """The regions matmul and swiglu one after the other: the same bits, and the backward needs what is between."""
    x_TK, w_NK = operands
    gate_up_TN = checkpoint_name(MATMUL.bind(x_TK, w_NK, leaves=1, out_dtype=x_TK.dtype.name), MATMUL.name)
    return checkpoint_name(SWIGLU.bind(gate_up_TN), SWIGLU.name), (x_TK, w_NK, gate_up_TN)


_call = differentiable(REGION, vjp.backward, forward=_forward)


def gated_matmul(x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
    """silu(x @ gate.T) * (x @ up.T), [T, K] and [2 I, K] to [T, I]: the gate's weights first, then up's.

    Bit for bit `swiglu(matmul(x, w, leaves=1))`, which is also what runs under differentiation. `w` may be stored wider
    than `x`, as for `matmul`. Raises ValueError for shapes that do not fit. Source: Shazeer 2020.
    """
    return _call(x_TK, w_NK)
