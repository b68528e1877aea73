"""The gated matmul's backward: SwiGLU's, then the matmul's."""

from typing import Any

import jax

from pallas_kernels.matmul import vjp as matmul
from pallas_kernels.swiglu import vjp as swiglu


def backward(residuals: Any, cotangent_TI: jax.Array) -> tuple[jax.Array, ...]:
    """Cotangents of rows and weights. residuals: both, and the rounded products of gate and up side by side."""
    x_TK, w_NK, gate_up_TN = residuals
    (g_TN,) = swiglu.backward((gate_up_TN,), cotangent_TI)
    return matmul.backward((x_TK, w_NK, ()), g_TN)
