"""RMSNorm for XLA:CPU, alone and after a residual add, over fixed row tiles.

H is the hidden size; r a row tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.loops import constant, divide, map_row_tiles, pin
from pallas_kernels.rounding import round_to, row_sum, widen


def normalize(x: jax.Array, w_H: jax.Array, eps: float, dtype: Any, zero: jax.Array) -> jax.Array:
    """RMSNorm of fp32 rows over the last axis, before its last round.

    The order of Hugging Face: normalise, round to `dtype`, multiply by the weight. Every operation rounds on its own.
    """
    total = pin(row_sum(pin(x * x, zero)), zero)[..., None]
    mean = pin(divide(total, constant(x.shape[-1], zero)), zero)
    inverse = jnp.float32(1.0) / pin(jnp.sqrt(mean + jnp.float32(eps)), zero)
    return pin(round_to(x * inverse, dtype) * w_H, zero)


def rms_norm(x: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array]:
    """The region's CPU form, any number of leading axes."""
    if 0 in x.shape:
        return (jnp.zeros(x.shape, x.dtype),)
    hidden, w = x.shape[-1], widen(w_H)
    x_TH = x if x.ndim == 2 else x.reshape(int(np.prod(x.shape[:-1])), hidden)
    (y,) = map_row_tiles(lambda zero, x_rH: (normalize(x_rH, w, eps, x.dtype, zero),), [x_TH], [((hidden,), x.dtype)])
    return (y.reshape(x.shape),)


def add_rms_norm(x_TH: jax.Array, residual_TH: jax.Array, w_H: jax.Array, *, eps: float) -> tuple[jax.Array, jax.Array]:
    """The region's CPU form: the normed sum and the sum."""
    dtype, w = x_TH.dtype, widen(w_H)
    if 0 in x_TH.shape:
        return jnp.zeros(x_TH.shape, dtype), jnp.zeros(x_TH.shape, dtype)

    def tile(zero: jax.Array, x_rH: jax.Array, residual_rH: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = pin(round_to(x_rH + residual_rH, dtype), zero)
        return normalize(total, w, eps, dtype, zero), total

    result = ((x_TH.shape[1],), dtype)
    normed, total = map_row_tiles(tile, [x_TH, residual_TH], [result, result])
    return normed, total
