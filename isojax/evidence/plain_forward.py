"""A forward as one writes it without regions: jnp, XLA's own dots and fusions. What exact parity is compared with."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from isojax.policy import PolicyConfig
from isojax.policy.policy import Parameters

# B: sequences, S: tokens of a sequence, H: hidden size, K: key heads, G: query heads a key head, D: head dimension,
# V: vocabulary, P: positions of the rope table.


@partial(jax.jit, static_argnums=0)
def plain_log_probs(config: PolicyConfig, params: Parameters, rope_PD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    """fp32 [B, S - 1]: log-probability of every token but the first, at temperature 1.

    params: a policy's packed parameters, whose dtype is that of all activations. tokens: int32, padded on the right
    with any token, whose own values are then meaningless. Norms, rotations and softmaxes are fp32, everything else the
    parameters' dtype, as in the Hugging Face reference; the order of every sum is the compiler's.
    """
    hidden_BSH = params["embed"][tokens_BS]
    # The table holds cosines and sines of half a head, which serve both halves.
    cos_SD, sin_SD = (jnp.tile(half, (1, 2)) for half in jnp.split(rope_PD[: tokens_BS.shape[1]], 2, axis=1))
    stacked = {name.removeprefix("layers."): value for name, value in params.items() if name.startswith("layers.")}

    def layer(hidden_BSH: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        normed_BSH = _norm(hidden_BSH, weights["input_norm"], config.rms_norm_eps)
        hidden_BSH = hidden_BSH + _attention(config, weights, normed_BSH, cos_SD, sin_SD)
        normed_BSH = _norm(hidden_BSH, weights["post_attention_norm"], config.rms_norm_eps)
        gate, up = jnp.split(normed_BSH @ weights["gate_up"].T, 2, axis=-1)
        return hidden_BSH + (jax.nn.silu(gate) * up) @ weights["down"].T, None

    hidden_BSH, _ = jax.lax.scan(layer, hidden_BSH, stacked | {"input_norm": params["norms"][:-1]})
    normed_BSH = _norm(hidden_BSH, params["norms"][-1], config.rms_norm_eps)
    head_VH = params["embed" if config.tied_head else "lm_head"]
    logits_BSV = (normed_BSH[:, :-1] @ head_VH.T).astype(jnp.float32)
    chosen_BS = jnp.take_along_axis(logits_BSV, tokens_BS[:, 1:, None], axis=-1)[..., 0]
    return chosen_BS - jax.nn.logsumexp(logits_BSV, axis=-1)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def _attention(
    config: PolicyConfig, weights: dict[str, jax.Array], normed_BSH: jax.Array, cos_SD: jax.Array, sin_SD: jax.Array
) -> jax.Array:
    """Causal attention with its output projection, [B, S, H]."""
    batch, length, _ = normed_BSH.shape
    qkv = normed_BSH @ weights["qkv"].T
    if config.attention_bias:
        qkv = qkv + weights["qkv_bias"]
    q, k, v = jnp.split(qkv, (config.query_size, config.query_size + config.key_size), axis=-1)
    q, k, v = (x.reshape(batch, length, -1, config.head_dim) for x in (q, k, v))
    if config.qk_norm:
        q = _norm(q, weights["q_norm"], config.rms_norm_eps)
        k = _norm(k, weights["k_norm"], config.rms_norm_eps)
    q, k = (_rotate(x, cos_SD, sin_SD) for x in (q, k))
    q_BSKGD = q.reshape(batch, length, config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum("bskgd,btkd->bkgst", q_BSKGD, k, preferred_element_type=jnp.float32) * config.softmax_scale
    causal_SS = jnp.tril(jnp.ones((length, length), bool))
    weights_BKGSS = jax.nn.softmax(jnp.where(causal_SS, scores, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bkgst,btkd->bskgd", weights_BKGSS, v).reshape(batch, length, config.query_size)
    out = mixed @ weights["o"].T
    return out + weights["o_bias"] if config.attention_bias else out


def _rotate(x_BSND: jax.Array, cos_SD: jax.Array, sin_SD: jax.Array) -> jax.Array:
    wide = x_BSND.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (wide * cos_SD[:, None] + turned * sin_SD[:, None]).astype(x_BSND.dtype)
