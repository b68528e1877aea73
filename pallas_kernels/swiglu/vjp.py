"""SwiGLU's backward: plain JAX in fp32."""

from typing import Any

import jax
import jax.numpy as jnp


def backward(residuals: Any, cotangent_TI: jax.Array) -> tuple[jax.Array]:
    """The cotangent of gate and up, side by side."""
    (gate_up_T2I,) = residuals
    gate, up = jnp.split(gate_up_T2I.astype(jnp.float32), 2, axis=1)
    g_TI = cotangent_TI.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    g_gate = g_TI * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    g_up = g_TI * gate * sigmoid
    return (jnp.concatenate([g_gate, g_up], axis=1).astype(gate_up_T2I.dtype),)
