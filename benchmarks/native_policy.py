"""The policy as one writes it for speed alone: XLA's own dots, cuDNN's attention, a scan over layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from isojax.policy import PolicyConfig

# B: sequences, S: tokens of a sequence, T: all of them, H: hidden size, D: head dimension, V: vocabulary,
# P: positions of the rope table, c: tokens of a chunk.

HEAD_CHUNK = 2048


def native_log_probs(
    config: PolicyConfig,
    params: Mapping[str, jax.Array],
    rope_PD: jax.Array,
    tokens_BS: jax.Array,
    targets_BS: jax.Array,
    *,
    remat: bool,
    chunked_head: bool,
) -> jax.Array:
    """fp32 [B, S]: log-probability of every target.

    remat: each layer is computed again in the backward. chunked_head: the logits of `HEAD_CHUNK` tokens at once, which
    the backward computes again; else all of them are made, and kept for it.
    """
    stacked = {name.removeprefix("layers."): value for name, value in params.items() if name.startswith("layers.")}
    stacked["input_norm"] = params["norms"][:-1]
    body = partial(_layer, config, rope_PD[: tokens_BS.shape[1]])
    if remat:
        body = jax.checkpoint(body, prevent_cse=False)
    hidden_BSH, _ = lax.scan(body, params["embed"][tokens_BS], stacked)
    hidden_TH = _norm(hidden_BSH, params["norms"][-1], config.rms_norm_eps).reshape(-1, config.hidden_size)
    head_VH = params["embed" if config.tied_head else "lm_head"]
    targets_T = targets_BS.reshape(-1)
    if not chunked_head:
        return _chosen(head_VH, hidden_TH, targets_T).reshape(tokens_BS.shape)
    chunk = min(HEAD_CHUNK, len(targets_T))
    chunks = hidden_TH.reshape(-1, chunk, config.hidden_size), targets_T.reshape(-1, chunk)
    chosen = jax.checkpoint(lambda pair: _chosen(head_VH, *pair), prevent_cse=False)
    return lax.map(chosen, chunks).reshape(tokens_BS.shape)


def _chosen(head_VH: jax.Array, hidden_cH: jax.Array, targets_c: jax.Array) -> jax.Array:
    logits_cV = jnp.dot(hidden_cH, head_VH.T, preferred_element_type=jnp.float32)
    chosen_c = jnp.take_along_axis(logits_cV, targets_c[:, None], axis=1)[:, 0]
    return chosen_c - jax.nn.logsumexp(logits_cV, axis=1)


def _layer(
    config: PolicyConfig, cos_sin_SD: jax.Array, hidden_BSH: jax.Array, weights: Mapping[str, jax.Array]
) -> tuple[jax.Array, None]:
    batch, length, _ = hidden_BSH.shape
    normed_BSH = _norm(hidden_BSH, weights["input_norm"], config.rms_norm_eps)
    qkv = normed_BSH @ weights["qkv"].T
    if config.attention_bias:
        qkv = qkv + weights["qkv_bias"]
    q, k, v = (
        part.reshape(batch, length, -1, config.head_dim)
        for part in jnp.split(qkv, (config.query_size, config.query_size + config.key_size), axis=-1)
    )
    if config.qk_norm:
        q = _norm(q, weights["q_norm"], config.rms_norm_eps)
        k = _norm(k, weights["k_norm"], config.rms_norm_eps)
    q, k = (_rotate(x, cos_sin_SD) for x in (q, k))
    mixed = jax.nn.dot_product_attention(
        q, k, v, scale=config.softmax_scale, is_causal=True, implementation="cudnn" if _on_cuda() else "xla"
    )
    out = mixed.reshape(batch, length, config.query_size) @ weights["o"].T
    if config.attention_bias:
        out = out + weights["o_bias"]
    hidden_BSH = hidden_BSH + out
    normed_BSH = _norm(hidden_BSH, weights["post_attention_norm"], config.rms_norm_eps)
    gate, up = jnp.split(normed_BSH @ weights["gate_up"].T, 2, axis=-1)
    return hidden_BSH + (jax.nn.silu(gate) * up) @ weights["down"].T, None


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return weight * (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def _rotate(x_BSND: jax.Array, cos_sin_SD: jax.Array) -> jax.Array:
    cos, sin = (half[:, None] for half in jnp.split(cos_sin_SD, 2, axis=1))
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSND.dtype)


def _on_cuda() -> bool:
    return jax.default_backend() == "gpu"
