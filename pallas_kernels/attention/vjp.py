"""The packed attention's backward: plain JAX over chunks of queries, weights recomputed in fp32."""

from typing import Any

import jax
import jax.numpy as jnp


def backward(residuals: Any, cotangent_THD: jax.Array, *, scale: float, split: int) -> tuple[Any, ...]:
    """Cotangents of q, k and v; positions, segments and layer get none."""
    q_THD, k_TKD, v_TKD, positions_T, *_ = residuals
    tokens, _, head = q_THD.shape
    key_heads = k_TKD.shape[1]
    start_T = jnp.arange(tokens) - positions_T
    visible = (start_T[:, None] == start_T[None, :]) & (jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :])
    q, g = (a.astype(jnp.float32).reshape(tokens, key_heads, -1, head) for a in (q_THD, cotangent_THD))
    k, v = k_TKD.astype(jnp.float32), v_TKD.astype(jnp.float32)
    score = jnp.where(visible, jnp.einsum("tkgd,skd->kgts", q, k) * scale, -jnp.inf)
    weight = jax.nn.softmax(score, axis=-1)
    g_v = jnp.einsum("kgts,tkgd->skd", weight, g)
    g_weight = jnp.einsum("tkgd,skd->kgts", g, v)
    g_score = weight * (g_weight - jnp.sum(weight * g_weight, axis=-1, keepdims=True)) * scale
    g_q = jnp.einsum("kgts,skd->tkgd", g_score, k).reshape(q_THD.shape)
    g_k = jnp.einsum("kgts,tkgd->skd", g_score, q)
    gradients = (g.astype(x.dtype) for g, x in zip((g_q, g_k, g_v), (q_THD, k_TKD, v_TKD), strict=True))
    return *gradients, None, None, None
