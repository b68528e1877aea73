"""The data movement that a translated graph may hold: how each torch call is spelled in JAX, for merged segments."""

import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import torch

from bridge.arrays import jax_dtype

# Every function here takes what the torch function of the same line takes, as the translator writes it.


def _narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, start, start + length, axis=dim)


def _strided(x: jax.Array, dim: int, start: int, end: int, step: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, start, end, step, axis=dim)


def _select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return jax.lax.index_in_dim(x, index, axis=dim, keepdims=False)


def _split(x: jax.Array, sizes: Sequence[int], dim: int) -> Sequence[jax.Array]:
    return jax.lax.split(x, sizes, dim)


def _pad(x: jax.Array, widths: Sequence[int], *, value: float) -> jax.Array:
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    return jnp.pad(x, pairs[::-1], constant_values=value)


def _index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    # torch raises for an index out of range, a compiled segment cannot: NaN rows are refused where logits are made.
    return x.at[(slice(None),) * dim + (index,)].get(mode="fill", wrap_negative_indices=False)


def _arange(end: int, *, dtype: torch.dtype, device: object = None) -> jax.Array:
    return jnp.arange(end, dtype=jax_dtype(dtype))


def _full(shape: Sequence[int], value: int, *, dtype: torch.dtype, device: object = None) -> jax.Array:
    return jnp.full(shape, value, jax_dtype(dtype))


def _to(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    return x.astype(jax_dtype(dtype))


# A call's target in the graph (a function, or a method's name) -> the same move on JAX arrays.
JAX_FORMS: dict[Callable[..., object] | str, Callable[..., object]] = {
    torch.reshape: jnp.reshape,
    torch.permute: jnp.transpose,
    torch.broadcast_to: jnp.broadcast_to,
    torch.narrow: _narrow,
    torch.ops.aten.slice.Tensor: _strided,
    torch.select: _select,
    torch.split: _split,
    torch.cat: lambda parts, dim: jax.lax.concatenate(parts, dim),
    torch.stack: lambda parts, dim: jnp.stack(parts, dim),
    torch.flip: jnp.flip,
    torch.nn.functional.pad: _pad,
    torch.index_select: _index_select,
    torch.where: jnp.where,
    torch.arange: _arange,
    torch.full: _full,
    "to": _to,
    torch.add: jnp.add,
    torch.sub: jnp.subtract,
    torch.mul: jnp.multiply,
    torch.lt: jnp.less,
    torch.le: jnp.less_equal,
    torch.gt: jnp.greater,
    torch.ge: jnp.greater_equal,
    torch.eq: jnp.equal,
    torch.ne: jnp.not_equal,
    torch.maximum: jnp.maximum,
    torch.minimum: jnp.minimum,
    torch.neg: jnp.negative,
    torch.bitwise_and: jnp.bitwise_and,
    torch.bitwise_or: jnp.bitwise_or,
    torch.bitwise_xor: jnp.bitwise_xor,
    torch.bitwise_not: jnp.bitwise_not,
    operator.getitem: operator.getitem,
}

VIEWS: frozenset[Callable[..., object]] = frozenset(
    {
        torch.reshape,
        torch.permute,
        torch.narrow,
        torch.ops.aten.slice.Tensor,
        torch.select,
        torch.split,
        operator.getitem,
    }
)
"""The moves that copy nothing when they are applied to a contiguous parameter."""
