"""The matmul's backward: plain JAX, fp32 sums."""

from typing import Any

import jax
import jax.numpy as jnp


def keep(operands: tuple[jax.Array, ...], result: jax.Array) -> Any:
    """Rows and weights; of the bias only the dtype."""
    return operands[0], operands[1], tuple(jnp.zeros((0,), bias.dtype) for bias in operands[2:])


def backward(residuals: Any, cotangent_TN: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    """Cotangents of rows, weights and bias, each in its operand's dtype."""
    x_TK, w_NK, bias = residuals
    g_TN = cotangent_TN.astype(jnp.float32)
    g_x = (g_TN @ w_NK.astype(jnp.float32)).astype(x_TK.dtype)
    g_w = (g_TN.T @ x_TK.astype(jnp.float32)).astype(w_NK.dtype)
    return g_x, g_w, *(g_TN.sum(0).astype(empty.dtype) for empty in bias)
