"""The backward of QK-norm and RoPE: plain JAX in fp32; the table of angles gets no gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.qk_norm_rope.cpu import cut_heads
from pallas_kernels.rms_norm.vjp import norm_backward


def _rotate_back(g_THD: jax.Array, cos_sin_TD: jax.Array) -> jax.Array:
    cos, sin = (half[:, None, :] for half in jnp.split(cos_sin_TD, 2, axis=-1))
    first, second = jnp.split(g_THD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def backward(
    residuals: Any, cotangents: tuple[jax.Array, jax.Array, jax.Array], *, key_heads: int, eps: float
) -> tuple[Any, ...]:
    """Cotangents of qkv and, where given, of the two norm weights; the table is a constant of the policy."""
    qkv_TC, cos_sin_TD, *norms = residuals
    g_heads = [_rotate_back(g, cos_sin_TD) for g in cotangents[:2]]
    g_norms = []
    if norms:
        heads = cut_heads(qkv_TC, cos_sin_TD.shape[1], key_heads)[:2]
        pairs = [norm_backward(x, w, g, eps) for x, w, g in zip(heads, norms, g_heads, strict=True)]
        g_heads = [g for g, _ in pairs]
        g_norms = [g.astype(w.dtype) for (_, g), w in zip(pairs, norms, strict=True)]
    parts = [g.astype(qkv_TC.dtype).reshape(g.shape[0], -1) for g in (*g_heads, cotangents[2])]
    return jnp.concatenate(parts, axis=1), None, *g_norms
