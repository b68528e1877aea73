"""RMSNorm's backward: plain JAX, fp32 sums."""

from typing import Any

import jax
import jax.numpy as jnp


def norm_backward(x: jax.Array, w_H: jax.Array, cotangent: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """fp32 cotangents of the input and the weight of one RMSNorm over the last axis."""
    wide, g = x.astype(jnp.float32), cotangent.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normal = wide * inverse
    g_w = jnp.sum(g * normal, axis=tuple(range(x.ndim - 1)))
    g_normal = g * w_H.astype(jnp.float32)
    g_x = inverse * (g_normal - normal * jnp.mean(g_normal * normal, axis=-1, keepdims=True))
    return g_x, g_w


def backward(residuals: Any, cotangent: jax.Array, *, eps: float) -> tuple[jax.Array, ...]:
    """Cotangents of rms_norm's operands."""
    x, w_H = residuals
    g_x, g_w = norm_backward(x, w_H, cotangent, eps)
    return g_x.astype(x.dtype), g_w.astype(w_H.dtype)


def add_backward(residuals: Any, cotangents: tuple[jax.Array, jax.Array], *, eps: float) -> tuple[jax.Array, ...]:
    """Cotangents of add_rms_norm's operands; the residuals are the sum and the weight."""
    total_TH, w_H, x_empty, residual_empty = residuals
    g_x, g_w = norm_backward(total_TH, w_H, cotangents[0], eps)
    g_total = g_x + cotangents[1].astype(jnp.float32)
    return g_total.astype(x_empty.dtype), g_total.astype(residual_empty.dtype), g_w.astype(w_H.dtype)


def sum_backward(residuals: Any, cotangents: tuple[jax.Array, jax.Array], *, eps: float) -> tuple[Any, ...]:
    """Cotangents of add_rms_norm's operands where the norm's gradient is taken elsewhere: the sum's alone."""
    return cotangents[1], cotangents[1], None
