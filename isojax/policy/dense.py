"""The dense decoder of the llama and Qwen3 families: one scan over stacked layers, all rounding in regions."""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from isojax.policy.config import PolicyConfig
from isojax.policy.embedding import embed
from isojax.policy.sharded import gather

# T: tokens of the packed batch, H: hidden size, L: layers, D: head dimension, I: feed-forward size, V: vocabulary,
# Q: query elements (heads x D), K: key elements (key heads x D), P: positions of the rope table.

Remat = Literal["none", "layer", "regions"]
REMATS: tuple[Remat, ...] = get_args(Remat)
SAVED = ("matmul", "attention")
"""Regions whose results remat "regions" keeps: the costly ones."""


class DenseLayer(nnx.Module):
    """One decoder layer. As a part of `DensePolicy` its parameters carry a leading layer axis L."""

    def __init__(
        self, config: PolicyConfig, dtype: jnp.dtype, stack: tuple[int, ...] = (), operations: Any = pallas_kernels
    ) -> None:
        """Allocate zeros; `stack` is () for a single layer or (L,) for all of them. operations: see `DensePolicy`."""
        self.config = config
        self.operations = operations
        H, I, Q, K, D = (  # noqa: E741
            config.hidden_size,
            config.intermediate_size,
            config.query_size,
            config.key_size,
            config.head_dim,
        )

        def parameter(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros((*stack, *shape), dtype))

        self.qkv = parameter(Q + 2 * K, H)
        if config.attention_bias:
            self.qkv_bias = parameter(Q + 2 * K)
            self.o_bias = parameter(H)
        if config.qk_norm:
            self.q_norm = parameter(D)
            self.k_norm = parameter(D)
        self.o = parameter(H, Q)
        self.post_attention_norm = parameter(H)
        self.gate_up = parameter(2 * I, H)
        self.down = parameter(H, I)

    def __call__(
        self,
        normed_TH: jax.Array,
        residual_TH: jax.Array,
        next_norm_H: jax.Array,
        cos_sin_TD: jax.Array,
        positions_T: jax.Array,
        segment_ids_T: jax.Array,
        layer: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention and feed-forward. Takes and returns (normed input, residual stream), both [T, H].

        The input arrives normalised and the layer ends with the norm of the next one, so that each residual add is
        fused with the norm that follows it: one rounding of the sum, before the variance. The returned normed input
        has no gradient until `norm_gradient` gives it one.
        """
        config = self.config
        qkv = self.operations.matmul(normed_TH, self.qkv[...], self.qkv_bias[...] if config.attention_bias else None)
        q, k, v = self.operations.qk_norm_rope(
            qkv,
            cos_sin_TD,
            self.q_norm[...] if config.qk_norm else None,
            self.k_norm[...] if config.qk_norm else None,
            key_heads=config.num_kv_heads,
            eps=config.rms_norm_eps,
        )
        attended = self.operations.attention(
            q, k, v, positions_T, segment_ids_T, layer, scale=config.softmax_scale, split=config.attention_split
        )
        projected = self.operations.matmul(
            attended.reshape(attended.shape[0], config.query_size),
            self.o[...],
            self.o_bias[...] if config.attention_bias else None,
            leaves=config.leaves,
        )
        normed, residual = self.operations.add_rms_norm(
            projected, residual_TH, self.post_attention_norm[...], eps=config.rms_norm_eps
        )
        gated = self.operations.gated_matmul(normed, self.gate_up[...])
        fed = self.operations.matmul(gated, self.down[...], leaves=config.leaves)
        return self.operations.add_rms_norm_carried(fed, residual, next_norm_H, eps=config.rms_norm_eps)


class DensePolicy(nnx.Module):
    """Embedding, stacked layers, norms and head. Parameter paths joined by dots are the policy's flat names."""

    def __init__(
        self, config: PolicyConfig, dtype: jnp.dtype, remat: Remat = "layer", operations: Any = pallas_kernels
    ) -> None:
        """Allocate zeros in `dtype`; `remat` says what the backward computes again, see `Policy`.

        operations: what holds the arithmetic: the regions, or functions of the same names without them.
        """
        self.config = config
        self.operations = operations
        self.remat = remat
        # A manual mesh axis over which every parameter is cut along axis 1 (fully sharded), if any.
        self.gather_axis: str | None = None
        self.embed = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = DenseLayer(config, dtype, (config.num_layers,), operations)
        # Row l is the input norm of layer l, the last row the final norm.
        self.norms = nnx.Param(jnp.zeros((config.num_layers + 1, config.hidden_size), dtype))
        if not config.tied_head:
            self.lm_head = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))

    @property
    def head_VH(self) -> jax.Array:
        """The output projection, [V, H]: the embedding itself where the head is tied."""
        return self._whole(self.embed[...] if self.config.tied_head else self.lm_head[...], axis=1)

    def hidden(
        self, rope_table_PD: jax.Array, tokens_T: jax.Array, positions_T: jax.Array, segment_ids_T: jax.Array
    ) -> jax.Array:
        """Final-normed hidden states [T, H] of a packed batch."""
        eps = self.config.rms_norm_eps
        cos_sin_TD = rope_table_PD.at[positions_T].get(mode="promise_in_bounds", wrap_negative_indices=False)
        residual_TH = embed(self._whole(self.embed[...], axis=1), tokens_T)
        norms_LH = self._whole(self.norms[...], axis=1)
        normed_TH = self.operations.rms_norm(residual_TH, norms_LH[0], eps=eps)
        definition, stacked = nnx.split(self.layers)

        def body(carry, layer_inputs):
            state, norm_H, next_norm_H, layer = layer_inputs
            normed_TH, residual_TH = carry
            normed_TH = self.operations.norm_gradient(normed_TH, residual_TH, norm_H, eps=eps)
            # Gathered here, so that a device holds the whole weights of one layer at a time. The scan took the layer
            # axis away, so axis 1 is axis 0.
            decoder_layer = nnx.merge(definition, jax.tree.map(partial(self._whole, axis=0), state))
            shared = next_norm_H, cos_sin_TD, positions_T, segment_ids_T, layer
            return decoder_layer(normed_TH, residual_TH, *shared), None

        if self.remat != "none":
            # By name, since JAX's own policies look for dots, which a region is not to them. The scan is a barrier of
            # its own, so common subexpressions can't undo the recomputation.
            saved = SAVED if self.remat == "regions" else ()
            policy = jax.checkpoint_policies.save_only_these_names(*saved)
            body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        layers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
        inputs = stacked, norms_LH[:-1], norms_LH[1:], layers
        (normed_TH, residual_TH), _ = jax.lax.scan(body, (normed_TH, residual_TH), inputs)
        return self.operations.norm_gradient(normed_TH, residual_TH, norms_LH[-1], eps=eps)

    def _whole(self, piece: jax.Array, axis: int) -> jax.Array:
        if self.gather_axis is None:
            return piece
        return gather(piece, self.gather_axis, axis)
