"""RMSNorm for XLA:CPU, alone and after a residual add, over fixed row tiles.

H is the hidden size; r a row tile.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.loops import hidden_zero, map_row_tiles, pin


def normalize(x: jax.Array, w: jax.Array, eps: float, zero: jax.Array) -> jax.Array:
    """RMSNorm over the last axis, in the order of Hugging Face: normalise, round, multiply by the weight, round."""
    wide = x.astype(jnp.float32)
    total = pin(jnp.sum(pin(wide * wide, zero), axis=-1, keepdims=True), zero)
    mean = pin(total / pin(jnp.float32(x.shape[-1]), zero), zero)
    inverse = jnp.float32(1.0) / pin(jnp.sqrt(mean + jnp.float32(eps)), zero)
    normal = (wide * inverse).astype(x.dtype)
    return (normal.astype(jnp.float32) * w.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """The region's CPU form, any number of leading axes."""
    if 0 in x.shape:
        return (jnp.zeros(x.shape, x.dtype),)
    hidden = x.shape[-1]
    x_TH = x if x.ndim == 2 else x.reshape(int(np.prod(x.shape[:-1])), hidden)
    zero = hidden_zero(x_TH)
    (y,) = map_row_tiles(lambda x_rH: (normalize(x_rH, w_H, eps, zero),), [x_TH], [((hidden,), x.dtype)], zero)
    return (y.reshape(x.shape),)


def add_rms_norm(x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """The region's CPU form: the normed sum and the sum."""
    if 0 in x_TH.shape:
        return jnp.zeros(x_TH.shape, x_TH.dtype), jnp.zeros(x_TH.shape, x_TH.dtype)
    zero = hidden_zero(x_TH)

    def tile(x_rH: jax.Array, residual_rH: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = (x_rH.astype(jnp.float32) + residual_rH.astype(jnp.float32)).astype(x_rH.dtype)
        return normalize(total, w_H, eps, zero), total

    result = ((x_TH.shape[1],), x_TH.dtype)
    normed, total = map_row_tiles(tile, [x_TH, residual_TH], [result, result], zero)
    return normed, total
