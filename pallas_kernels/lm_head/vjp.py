"""The backward of both log-probability forms: plain JAX, one chunk of rows of logits at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 256


def rows_backward(residuals: Any, cotangent_TV: jax.Array, *, vocab_size: int) -> tuple[jax.Array, ...]:
    """Cotangents of hidden rows, head weights and temperature for full rows."""
    x_TH, w_VH, temperature = residuals
    return _backward(x_TH, w_VH, temperature, cotangent_TV.astype(jnp.float32), lambda g_cV: g_cV, vocab_size)


def token_backward(residuals: Any, cotangent_T: jax.Array, *, vocab_size: int) -> tuple[Any, ...]:
    """Cotangents of hidden rows, head weights and temperature for one target a row."""
    x_TH, w_VH, targets_T, temperature = residuals

    def spread(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        g_c, targets_c = chunk
        return jax.nn.one_hot(targets_c, vocab_size, dtype=jnp.float32) * g_c[:, None]

    g = (cotangent_T.astype(jnp.float32), targets_T)
    g_x, g_w, g_temperature = _backward(x_TH, w_VH, temperature, g, spread, vocab_size)
    return g_x, g_w, None, g_temperature


def _backward(
    x_TH: jax.Array, w_VH: jax.Array, temperature: jax.Array, g: Any, spread: Callable[[Any], jax.Array], vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = x_TH.shape[0]
    w = w_VH[:vocab].astype(jnp.float32)
    chunk = min(CHUNK, tokens)
    count = -(-tokens // chunk) if tokens else 0

    def chunks(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, count * chunk - tokens), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(count, chunk, *array.shape[1:])

    def step(carry: tuple[jax.Array, jax.Array], inputs: Any) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        g_w, g_temperature = carry
        x_cH, g_c = inputs
        x_cH = x_cH.astype(jnp.float32)
        scaled_cV = (x_cH @ w.T) / temperature
        g_cV = spread(g_c)
        g_scaled = g_cV - jax.nn.softmax(scaled_cV, axis=-1) * jnp.sum(g_cV, axis=-1, keepdims=True)
        g_logits = g_scaled / temperature
        g_temperature = g_temperature - jnp.sum(g_scaled * scaled_cV) / temperature
        return (g_w + g_logits.T @ x_cH, g_temperature), g_logits @ w

    carry = (w * 0, temperature * 0)
    if count == 0:
        return jnp.zeros_like(x_TH), jnp.zeros_like(w_VH), jnp.zeros_like(temperature)
    (g_w, g_temperature), g_x = lax.scan(step, carry, (chunks(x_TH), jax.tree.map(chunks, g)))
    g_x_TH = g_x.reshape(count * chunk, -1)[:tokens].astype(x_TH.dtype)
    g_w_VH = jnp.pad(g_w, ((0, w_VH.shape[0] - vocab), (0, 0))).astype(w_VH.dtype)
    return g_x_TH, g_w_VH, g_temperature
