"""Token embedding: a gather forward, an fp32 scatter-add backward."""

import jax
import jax.numpy as jnp

# T: tokens, V: vocabulary, H: hidden size.


@jax.custom_vjp
def embed(embedding_VH: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Rows of the embedding, [T, H] in its dtype. `tokens` are int32 ids below V (checked where batches are made)."""
    # In bounds by contract: the plain gather is one op in XLA and one in the engine's graph.
    return embedding_VH.at[tokens_T].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _forward(embedding_VH: jax.Array, tokens_T: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embed(embedding_VH, tokens_T), (embedding_VH, tokens_T)


def _backward(saved: tuple[jax.Array, jax.Array], gradient_TH: jax.Array) -> tuple[jax.Array, None]:
    embedding_VH, tokens_T = saved
    # A frequent token collects thousands of rows: added up in bf16, most of them would be lost. Rounded once instead.
    total = jnp.zeros(embedding_VH.shape, jnp.float32).at[tokens_T].add(gradient_TH.astype(jnp.float32))
    return total.astype(embedding_VH.dtype), None


embed.defvjp(_forward, _backward)
