"""The matmul's backward: two products and a sum over the tokens, all summed in fp32."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dot import dot


def keep(operands: tuple[jax.Array, ...], result: jax.Array) -> Any:
    """Rows and weights; of the bias only the dtype."""
    return operands[0], operands[1], tuple(jnp.zeros((0,), bias.dtype) for bias in operands[2:])


def backward(residuals: Any, cotangent_TN: jax.Array, **parameters: Any) -> tuple[jax.Array, ...]:
    """Cotangents of rows, weights and bias, each in its operand's dtype."""
    x_TK, w_NK, bias = residuals
    g_x = dot(cotangent_TN, w_NK, axes=(1, 0), dtype=x_TK.dtype)
    g_w = dot(cotangent_TN, x_TK, axes=(0, 0), dtype=w_NK.dtype)
    return g_x, g_w, *(cotangent_TN.astype(jnp.float32).sum(0).astype(empty.dtype) for empty in bias)
