"""The cast for a card: XLA's own rounding, which it defines to the bit. No engine casts, so no kernel is sealed."""

import jax
import jax.numpy as jnp
from jax import lax


def cast(x: jax.Array, *, dtype: str) -> tuple[jax.Array]:
    """The region's form on a card."""
    if jnp.finfo(dtype).nmant < jnp.finfo(x.dtype).nmant:
        # Rounds by definition, where a pair of conversions may be removed.
        x = lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    return (x.astype(dtype),)
