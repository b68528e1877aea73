"""The packed attention's backward: the weights are computed again, so no [T, T] array is kept or made."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.by_platform import by_platform

# T tokens, H query heads, K key heads, D head size, G query heads of a key head, R query rows of a chunk.

ROWS = 128


def keep(operands: tuple[jax.Array, ...], result: jax.Array) -> tuple[jax.Array, ...]:
    """All operands but the layer's number, and the result."""
    return *operands[:-1], result


def backward(residuals: Any, cotangent_THD: jax.Array, *, scale: float, split: int) -> tuple[Any, ...]:
    """Cotangents of q, k and v; positions, segments and layer get none."""
    return *_backward(*residuals, cotangent_THD, scale=scale), None, None, None


def chunked_gradients(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    positions_T: jax.Array,
    segment_ids_T: jax.Array,
    out_THD: jax.Array,
    cotangent_THD: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plain JAX in fp32, one chunk of queries against all keys after the other: up to [H, ROWS, T] scores at once."""
    tokens, _, head = q_THD.shape
    key_heads = k_TKD.shape[1]
    chunk = min(ROWS, tokens)
    if tokens == 0:
        return q_THD, k_TKD, v_TKD
    k, v = k_TKD.astype(jnp.float32), v_TKD.astype(jnp.float32)
    key_T = jnp.arange(tokens)
    # Padding rows give a constant zero.
    g_THD = jnp.where((segment_ids_T >= 0)[:, None, None], cotangent_THD, 0)

    def chunks(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, -tokens % chunk), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(-1, chunk, *array.shape[1:])

    def step(totals: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        g_k, g_v = totals
        q, out, g, position_R, row_R = rows
        q, out, g = (a.astype(jnp.float32).reshape(chunk, key_heads, -1, head) for a in (q, out, g))
        visible = (key_T <= row_R[:, None]) & (key_T >= (row_R - position_R)[:, None])
        score = jnp.where(visible, jnp.einsum("rkgd,skd->kgrs", q, k) * scale, -jnp.inf)
        weight = jax.nn.softmax(score, axis=-1)
        g_weight = jnp.einsum("rkgd,skd->kgrs", g, v)
        mean = jnp.einsum("rkgd,rkgd->kgr", g, out)
        g_score = weight * (g_weight - mean[..., None]) * scale
        g_k += jnp.einsum("kgrs,rkgd->skd", g_score, q)
        g_v += jnp.einsum("kgrs,rkgd->skd", weight, g)
        return (g_k, g_v), jnp.einsum("kgrs,skd->rkgd", g_score, k)

    rows = tuple(map(chunks, (q_THD, out_THD, g_THD, positions_T, key_T)))
    (g_k, g_v), g_q = jax.lax.scan(step, (jnp.zeros_like(k), jnp.zeros_like(v)), rows)
    g_q_THD = g_q.reshape(-1, *q_THD.shape[1:])[:tokens]
    return g_q_THD.astype(q_THD.dtype), g_k.astype(k_TKD.dtype), g_v.astype(v_TKD.dtype)


def _cuda_gradients(*operands: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    # Imported here: the JAX of a CPU-only process need not have what the kernels are written in.
    from pallas_kernels.attention.hopper_backward import hopper_gradients

    return hopper_gradients(*operands, scale=scale)


_backward = by_platform("attention_backward", cpu=chunked_gradients, cuda=_cuda_gradients)
