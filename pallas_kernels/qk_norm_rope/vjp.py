"""The backward of QK-norm and RoPE: plain JAX in fp32; the table of angles gets no gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.vjp import norm_backward


def _rotate_back(g_THD: jax.Array, cos_sin_TD: jax.Array) -> jax.Array:
    cos, sin = (half[:, None, :] for half in jnp.split(cos_sin_TD, 2, axis=-1))
    first, second = jnp.split(g_THD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def backward(residuals: Any, cotangents: tuple[jax.Array, jax.Array], *, eps: float) -> tuple[Any, ...]:
    """Cotangents of q, k and, where given, of the two norm weights; the table is a constant of the policy."""
    heads, cos_sin_TD, norms = residuals[:2], residuals[2], residuals[3:]
    g_heads = [_rotate_back(g, cos_sin_TD) for g in cotangents]
    if not norms:
        return *(g.astype(x.dtype) for g, x in zip(g_heads, heads, strict=True)), None
    pairs = [norm_backward(x, w, g, eps) for x, w, g in zip(heads, norms, g_heads, strict=True)]
    g_x = [g.astype(x.dtype) for (g, _), x in zip(pairs, heads, strict=True)]
    g_w = [g.astype(w.dtype) for (_, g), w in zip(pairs, norms, strict=True)]
    return *g_x, None, *g_w
