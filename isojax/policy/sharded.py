"""Parameters inside of shard_map: forwards they only move, backwards their gradients are summed in fp32."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

Axes = tuple[str, ...]


def gather(piece: jax.Array, mesh_axis: str, axis: int) -> jax.Array:
    """The whole of a parameter whose equal pieces along `axis` the devices of a mesh axis hold.

    The gradient is summed over the devices in fp32 and rounded once to the parameter's dtype; each keeps its piece.
    """
    return _gather(mesh_axis, axis, piece)


def spread(whole: jax.Array, mesh_axes: Axes) -> jax.Array:
    """A parameter that is the same on the devices of these axes, marked so that each may use it for rows of its own.

    The gradient is summed over the devices in fp32 and rounded once to the parameter's dtype.
    """
    same = tuple(axis for axis in mesh_axes if axis not in jax.typeof(whole).manual_axis_type.varying)
    return _spread(same, whole) if same else whole


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(mesh_axis: str, axis: int, piece: jax.Array) -> jax.Array:
    return lax.all_gather(piece, mesh_axis, axis=axis, tiled=True)


def _gather_forward(mesh_axis: str, axis: int, piece: jax.Array) -> tuple[jax.Array, None]:
    return _gather(mesh_axis, axis, piece), None


def _gather_backward(mesh_axis: str, axis: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    wide = cotangent.astype(jnp.float32)
    return (lax.psum_scatter(wide, mesh_axis, scatter_dimension=axis, tiled=True).astype(cotangent.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(mesh_axes: Axes, whole: jax.Array) -> jax.Array:
    return lax.pcast(whole, mesh_axes, to="varying")


def _spread_forward(mesh_axes: Axes, whole: jax.Array) -> tuple[jax.Array, None]:
    return _spread(mesh_axes, whole), None


def _spread_backward(mesh_axes: Axes, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (lax.psum(cotangent.astype(jnp.float32), mesh_axes).astype(cotangent.dtype),)


_spread.defvjp(_spread_forward, _spread_backward)
