"""The matmul region: rows times weights in checkpoint layout, K in leaves that fold as a fixed tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import cpu, vjp
from pallas_kernels.matmul.spec import SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable

LEAVES = (1, 2, 4, 8)


def _shape_rule(*operands: ShapeAndDtype, leaves: int, out_dtype: str) -> tuple[ShapeAndDtype, ...]:
    (x_shape, _), (w_shape, _), *bias = operands
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1]:
        raise ValueError(f"matmul needs x [T, K] and w [N, K]; got {x_shape} and {w_shape}")
    if bias and bias[0][0] != (w_shape[0],):
        raise ValueError(f"matmul needs a bias of shape ({w_shape[0]},); got {bias[0][0]}")
    if leaves not in LEAVES or x_shape[1] % leaves:
        raise ValueError(f"matmul cuts K = {x_shape[1]} into leaves = {leaves}: needs one of {LEAVES} that divides K")
    return (((x_shape[0], w_shape[0]), np.dtype(jnp.dtype(out_dtype))),)


REGION = Region(
    name="matmul",
    operands=("x", "w", "bias?"),
    parameters={"leaves": int, "out_dtype": str},
    results=("y",),
    shape_rule=_shape_rule,
    cpu=cpu.matmul,
    spec=SPEC,
)
_call = differentiable(REGION, vjp.backward, vjp.keep)


def matmul(
    x_TK: jax.Array, w_NK: jax.Array, bias_N: jax.Array | None = None, *, leaves: int = 1, out_dtype: Any = None
) -> jax.Array:
    """x @ w.T + bias, [T, K] and [N, K] to [T, N].

    `w` may be stored wider than `x` (fp32 holding bf16 values): the result's bits are the same. `leaves` is 1, 2, 4 or
    8 and divides K. `out_dtype` defaults to x's. Raises ValueError for shapes that do not fit.
    """
    dtype = jnp.dtype(out_dtype or x_TK.dtype).name
    operands = (x_TK, w_NK) if bias_N is None else (x_TK, w_NK, bias_N)
    return _call(*operands, leaves=leaves, out_dtype=dtype)
