"""Token embedding: a gather forward, an fp32 scatter-add backward."""

import jax
import jax.numpy as jnp

from pallas_kernels.jax_api import vary_alike

# T: tokens, V: vocabulary, H: hidden size.


def embed(embedding_VH: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Rows of the embedding, [T, H] in its dtype. `tokens` are int32 ids below V (checked where batches are made)."""
    # Inside of shard_map the mark makes JAX add up the gradients of a replicated embedding over the shards.
    return _embed(*vary_alike((embedding_VH, tokens_T)))


@jax.custom_vjp
def _embed(embedding_VH: jax.Array, tokens_T: jax.Array) -> jax.Array:
    # In bounds by contract: the plain gather is one op in XLA and one in the engine's graph.
    return embedding_VH.at[tokens_T].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _forward(embedding_VH: jax.Array, tokens_T: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _embed(embedding_VH, tokens_T), (embedding_VH, tokens_T)


def _backward(saved: tuple[jax.Array, jax.Array], gradient_TH: jax.Array) -> tuple[jax.Array, None]:
    embedding_VH, tokens_T = saved
    # A frequent token collects thousands of rows: added up in bf16, most of them would be lost. Rounded once instead.
    total = jnp.zeros(embedding_VH.shape, jnp.float32).at[tokens_T].add(gradient_TH.astype(jnp.float32))
    return total.astype(embedding_VH.dtype), None


_embed.defvjp(_forward, _backward)
