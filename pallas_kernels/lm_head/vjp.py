"""The backward of both log-probability forms, a piece of the logits at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.by_platform import by_platform
from pallas_kernels.dot import dot

# T tokens, H hidden, V vocabulary, P stored rows of the weights; c rows of a chunk of tokens, v columns of a piece.

CHUNK = 256
"""Rows of logits that the full rows' backward holds at once."""
COLUMN_STEP = 128
CPU_LOGITS, CUDA_LOGITS = 2**24, 2**27
"""Logits that the single targets' backward holds at once: of all rows, so the weights' gradient is one product."""


def rows_backward(residuals: Any, cotangent_TV: jax.Array, *, vocab_size: int) -> tuple[jax.Array, ...]:
    """Cotangents of hidden rows, head weights and temperature for full rows."""
    return _rows(*residuals, cotangent_TV, vocab_size=vocab_size)


def keep_log_probs(operands: tuple[jax.Array, ...], log_probs_T: jax.Array) -> tuple[jax.Array, ...]:
    """The operands, and the results, which hold every row's sum of exponentials."""
    return *operands, log_probs_T


def token_backward(residuals: Any, cotangent_T: jax.Array, *, vocab_size: int) -> tuple[Any, ...]:
    """Cotangents of hidden rows, head weights and temperature for one target a row."""
    return probed_backward(residuals, cotangent_T, vocab_size=vocab_size)[:-1]


def probed_backward(residuals: Any, cotangent_T: jax.Array, *, vocab_size: int) -> tuple[Any, ...]:
    """The same, and in place of the probe's cotangent the entropy of every row."""
    g_x, g_w, g_temperature, entropy_T = _tokens(*residuals, cotangent_T, vocab_size=vocab_size)
    return g_x, g_w, None, g_temperature, entropy_T


def pieces(tokens: int, vocab_size: int, most: int) -> tuple[int, int]:
    """How many pieces the vocabulary is cut into, and the columns of one, so that about `most` logits exist at once."""
    count = max(1, -(-tokens * vocab_size // most))
    columns = min(vocab_size, -(-vocab_size // (count * COLUMN_STEP)) * COLUMN_STEP)
    return -(-vocab_size // columns), columns


def token_gradients(
    x_TH: jax.Array,
    w_PH: jax.Array,
    targets_T: jax.Array,
    temperature: jax.Array,
    log_probs_T: jax.Array,
    g_T: jax.Array,
    *,
    vocab_size: int,
    most: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cotangents of x, w and the temperature, and the entropy of every row, fp32 [T].

    The logits are computed again, one piece of the vocabulary after the other. A row's log-sum-exp needs no pass of its
    own: it is the target's logit, which costs one product of rows, less the log-probability that the forward gave.
    """
    tokens, hidden = x_TH.shape
    if tokens == 0:
        return jnp.zeros_like(x_TH), jnp.zeros_like(w_PH), jnp.zeros_like(temperature), jnp.zeros((0,), jnp.float32)
    count, columns = pieces(tokens, vocab_size, most)
    chosen_TH = w_PH.at[targets_T].get(mode="clip").astype(jnp.float32)
    target_T = jnp.sum(x_TH.astype(jnp.float32) * chosen_TH, axis=1) / temperature
    log_sum_T = target_T - log_probs_T
    # A row without a cotangent has no gradient, whatever stands there.
    live_T = g_T != 0

    def piece(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        g_x, g_w, mean_T = carry
        # The last piece begins earlier than its number says, so that it is whole, and has zeros for the columns that
        # belong to the one before it. It comes first, so that those are then written over.
        number = count - 1 - step
        start = jnp.minimum(number * columns, vocab_size - columns)
        column_v = start + jnp.arange(columns)
        w_vH = lax.dynamic_slice_in_dim(w_PH, start, columns)
        scaled_Tv = dot(x_TH, w_vH, axes=(1, 1)) / temperature
        weight_Tv = jnp.exp(scaled_Tv - log_sum_T[:, None])
        own_v = column_v >= number * columns
        mean_T += jnp.sum(jnp.where(own_v, weight_Tv * scaled_Tv, 0), axis=1)
        g_Tv = g_T[:, None] / temperature * ((column_v == targets_T[:, None]) - weight_Tv)
        g_Tv = jnp.where(live_T[:, None] & own_v, g_Tv, 0)
        g_w = lax.dynamic_update_slice_in_dim(g_w, dot(g_Tv, x_TH, axes=(0, 0), dtype=g_w.dtype), start, 0)
        return g_x + dot(g_Tv, w_vH, axes=(1, 0)), g_w, mean_T

    carry = (jnp.zeros((tokens, hidden), jnp.float32), jnp.zeros_like(w_PH), jnp.zeros((tokens,), jnp.float32))
    g_x, g_w, mean_T = lax.fori_loop(0, count, piece, carry)
    g_temperature = -jnp.sum(jnp.where(live_T, g_T * (target_T - mean_T), 0)) / temperature
    return g_x.astype(x_TH.dtype), g_w, g_temperature, log_sum_T - mean_T


_tokens = by_platform(
    "token_log_probs_backward",
    cpu=partial(token_gradients, most=CPU_LOGITS),
    cuda=partial(token_gradients, most=CUDA_LOGITS),
)


def _row_gradients(
    x_TH: jax.Array, w_PH: jax.Array, temperature: jax.Array, g_TV: jax.Array, *, vocab_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = x_TH.shape[0]
    if tokens == 0:
        return jnp.zeros_like(x_TH), jnp.zeros_like(w_PH), jnp.zeros_like(temperature)
    w_VH = w_PH[:vocab_size]
    chunk = min(CHUNK, tokens)
    count = -(-tokens // chunk)

    def chunks(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, count * chunk - tokens), (0, 0)))
        return padded.reshape(count, chunk, array.shape[1])

    def step(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        g_w, g_temperature = carry
        x_cH, g_cV = inputs
        scaled_cV = dot(x_cH, w_VH, axes=(1, 1)) / temperature
        g_scaled = g_cV - jax.nn.softmax(scaled_cV, axis=-1) * jnp.sum(g_cV, axis=-1, keepdims=True)
        g_logits = g_scaled / temperature
        g_temperature = g_temperature - jnp.sum(g_scaled * scaled_cV) / temperature
        return (g_w + dot(g_logits, x_cH, axes=(0, 0)), g_temperature), dot(g_logits, w_VH, axes=(1, 0))

    carry = (jnp.zeros(w_VH.shape, jnp.float32), jnp.zeros_like(temperature))
    (g_w, g_temperature), g_x = lax.scan(step, carry, (chunks(x_TH), chunks(g_TV)))
    g_x_TH = g_x.reshape(count * chunk, -1)[:tokens].astype(x_TH.dtype)
    g_w_PH = jnp.pad(g_w, ((0, w_PH.shape[0] - vocab_size), (0, 0))).astype(w_PH.dtype)
    return g_x_TH, g_w_PH, g_temperature


_rows: Callable[..., tuple[jax.Array, ...]] = by_platform(
    "log_prob_rows_backward", cpu=_row_gradients, cuda=_row_gradients
)
