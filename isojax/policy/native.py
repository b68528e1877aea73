"""A policy's arithmetic without regions: plain jnp, whose order of every sum is the compiler's. The baseline arm."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from isojax.kernels.packing import Packing
from isojax.policy.policy import Policy

# T: tokens, R: rows of tokens, S: tokens of a row, N: outputs, K: inputs, H: hidden size, V: vocabulary, C: channels of
# qkv, D: head dimension, I: feed-forward size, B: tokens of a block.

HEAD_BLOCK = 2048
"""Tokens whose logits exist at once: a whole batch's would not fit beside the weights."""


@dataclass(frozen=True)
class NativeOperations:
    """The functions of `pallas_kernels` that a policy calls, in plain JAX; each takes and returns the same arrays.

    Rounded where the Hugging Face reference rounds: norms, rotations and softmaxes are fp32 inside, everything else is
    in the activations' dtype. Gradients are JAX's own.

    row: tokens from the start of one sequence to the start of the next, at least; attention sees rows of that many.
    attention_by: implementation of `jax.nn.dot_product_attention`.
    """

    row: int
    attention_by: Literal["cudnn", "xla"]

    def matmul(self, x_TK: jax.Array, w_NK: jax.Array, bias_N: jax.Array | None = None, *, leaves: int = 1) -> Any:
        """x @ w.T + bias; `leaves` is the regions' own and unused."""
        y_TN = x_TK @ w_NK.T
        return y_TN if bias_N is None else y_TN + bias_N

    def rms_norm(self, x: jax.Array, w_H: jax.Array, *, eps: float) -> jax.Array:
        """RMSNorm over the last axis."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return w_H * wide.astype(x.dtype)

    def add_rms_norm(
        self, x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """(normed sum, sum)."""
        total_TH = x_TH + residual_TH
        return self.rms_norm(total_TH, w_H, eps=eps), total_TH

    add_rms_norm_carried = add_rms_norm

    def norm_gradient(self, normed_TH: jax.Array, sum_TH: jax.Array, w_H: jax.Array, *, eps: float) -> jax.Array:
        """The first argument: its gradient flows through the norm itself here."""
        return normed_TH

    def qk_norm_rope(
        self,
        qkv_TC: jax.Array,
        cos_sin_TD: jax.Array,
        q_norm_D: jax.Array | None = None,
        k_norm_D: jax.Array | None = None,
        *,
        key_heads: int,
        eps: float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, [T, heads, D] each; the first two normed where there are weights, and rotated."""
        tokens, head = cos_sin_TD.shape
        keys = key_heads * head
        q, k, v = (
            part.reshape(tokens, -1, head)
            for part in jnp.split(qkv_TC, (qkv_TC.shape[1] - 2 * keys, qkv_TC.shape[1] - keys), axis=1)
        )
        if q_norm_D is not None and k_norm_D is not None:
            q, k = self.rms_norm(q, q_norm_D, eps=eps), self.rms_norm(k, k_norm_D, eps=eps)
        return _rotate(q, cos_sin_TD), _rotate(k, cos_sin_TD), v

    def attention(
        self,
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        positions_T: jax.Array,
        segment_ids_T: jax.Array,
        layer: jax.Array,
        *,
        scale: float,
        split: int,
    ) -> jax.Array:
        """Causal attention inside of every row: a row holds one sequence from its start on, and padding behind it."""
        tokens = q_THD.shape[0]
        rows = -(-tokens // self.row)
        q, k, v = (
            jnp.pad(x, ((0, rows * self.row - tokens), (0, 0), (0, 0))).reshape(rows, self.row, *x.shape[1:])
            for x in (q_THD, k_TKD, v_TKD)
        )
        mixed = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation=self.attention_by)
        return mixed.reshape(-1, *q_THD.shape[1:])[:tokens]

    def gated_matmul(self, x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
        """silu(x @ gate.T) * (x @ up.T), the gate's weights first."""
        gate, up = jnp.split(x_TK @ w_NK.T, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def log_prob_rows(
        self, x_TH: jax.Array, w_VH: jax.Array, temperature: jax.Array | float, *, vocab_size: int
    ) -> jax.Array:
        """log_softmax(logits / temperature), fp32 [T, vocab_size]; the logits are rounded to the activations' dtype."""
        logits_TV = (x_TH @ w_VH[:vocab_size].T).astype(jnp.float32)
        return jax.nn.log_softmax(logits_TV / temperature, axis=-1)

    def token_log_probs(
        self,
        x_TH: jax.Array,
        w_VH: jax.Array,
        targets_T: jax.Array,
        temperature: jax.Array | float,
        *,
        vocab_size: int,
        entropy_probe_T: jax.Array | None = None,
    ) -> jax.Array:
        """The same at one target a row, fp32 [T], in blocks of tokens that the backward computes again.

        Raises NotImplementedError for an entropy probe.
        """
        if entropy_probe_T is not None:
            raise NotImplementedError("the native arm's head gives no entropies")
        tokens = len(targets_T)
        block = min(tokens, HEAD_BLOCK)
        blocks = -(-tokens // block)
        x = jnp.pad(x_TH, ((0, blocks * block - tokens), (0, 0))).reshape(blocks, block, -1)
        targets = jnp.pad(targets_T, (0, blocks * block - tokens)).reshape(blocks, block)
        # Widened outside of the loop, so that the blocks' gradients are summed in fp32 and not in the weights' dtype.
        wide_VH = w_VH.astype(jnp.float32)

        @jax.checkpoint
        def of_block(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
            x_BH, targets_B = inputs
            rows_BV = self.log_prob_rows(x_BH, wide_VH.astype(w_VH.dtype), temperature, vocab_size=vocab_size)
            return jnp.take_along_axis(rows_BV, targets_B[:, None], axis=1)[:, 0]

        return jax.lax.map(of_block, (x, targets)).reshape(-1)[:tokens]

    def cast(self, x: jax.Array, *, dtype: Any) -> jax.Array:
        """x in another float dtype."""
        return x.astype(dtype)


def native_policy(policy: Policy, longest: int) -> Policy:
    """The same policy with plain arithmetic in place of its regions, for sequences of at most `longest` tokens.

    Same module, parameters and remat. Batches must be laid out as its `packing` says: a sequence a row of `longest`
    tokens, so that cuDNN's attention (on a GPU, bf16) or XLA's takes them as an ordinary batch. Nothing is promised of
    its bits: it is what exactness is compared with.
    """
    config = dataclasses.replace(policy.config, max_position=min(longest, policy.config.max_position))
    cudnn = jax.default_backend() == "gpu" and policy.dtype == "bfloat16"
    native = Policy(
        config,
        dtype=policy.dtype,
        remat=policy.remat,
        rope=jax.device_get(policy.buffers["rope_table"])[: config.max_position],
        operations=NativeOperations(config.max_position, "cudnn" if cudnn else "xla"),
    )
    native.packing = Packing(start_multiple=config.max_position, sealed_lengths=())
    return native


def _rotate(x_TND: jax.Array, cos_sin_TD: jax.Array) -> jax.Array:
    # The table holds cosines and sines of half a head, which serve both halves.
    cos_TD, sin_TD = (jnp.tile(half, (1, 2)) for half in jnp.split(cos_sin_TD, 2, axis=1))
    wide = x_TND.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (wide * cos_TD[:, None] + turned * sin_TD[:, None]).astype(x_TND.dtype)
