"""The weight digest in JAX: where the weights are, without a copy to the host. See `contracts.weight_digest`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import BadCheckpoint
from contracts.weight_digest import (
    FINALISER,
    LANES,
    LARGEST_TENSOR,
    LAST_SHIFT,
    MASK,
    POSITION,
    START,
    TENSOR,
    WORD,
    combine,
    tensor_id_of,
)

# N: elements of one tensor in row-major order.

# Elements of one reduction: more would need 64-bit indices, and for a stack of layers they are not needed.
LARGEST_PIECE = 2**31


def digest(params: Mapping[str, jax.Array | np.ndarray]) -> str:
    """The digest of packed parameters, 16 hexadecimal digits; equals `contracts.weight_digest.weight_digest`.

    The order of the mapping does not matter. Raises `BadCheckpoint` for a tensor of more than 2**32 elements or of a
    dtype that is not 16 or 32 bits wide.
    """
    for name, tensor in params.items():
        if tensor.dtype.itemsize not in (2, 4) or tensor.size > LARGEST_TENSOR:
            raise BadCheckpoint(
                field=name,
                found=f"{tensor.dtype}[{tensor.size}]",
                allowed=f"at most {LARGEST_TENSOR} elements of 16 or 32 bits",
                reason="The digest mixes one 32-bit word and one 32-bit position an element.",
            )
    ids = {name: np.uint32(tensor_id_of(name)) for name in params}
    lanes = jax.device_get({name: _lanes(tensor, ids[name]) for name, tensor in params.items()})
    return combine((int(pair[0]), int(pair[1])) for pair in lanes.values())


@jax.jit
def _lanes(tensor: jax.Array, tensor_id: jax.Array) -> jax.Array:
    """Both lanes of one tensor, uint32 [2]. All arithmetic wraps, so the order of the sum does not matter."""
    if tensor.size < LARGEST_PIECE:
        return _piece_lanes(tensor, jnp.uint32(0), tensor_id)
    starts = jax.lax.iota(jnp.uint32, tensor.shape[0]) * jnp.uint32(tensor.size // tensor.shape[0])
    lanes = jax.lax.map(lambda piece: _piece_lanes(piece[0], piece[1], tensor_id), (tensor, starts))
    return jnp.sum(lanes, axis=0, dtype=jnp.uint32)


def _piece_lanes(tensor: jax.Array, start: jax.Array, tensor_id: jax.Array) -> jax.Array:
    """Both lanes of a piece of a tensor, whose first element is at position `start`."""
    unsigned = jnp.uint16 if tensor.dtype.itemsize == 2 else jnp.uint32
    word_N = jax.lax.bitcast_convert_type(tensor, unsigned).astype(jnp.uint32).reshape(-1)
    position_N = start + jax.lax.iota(jnp.uint32, word_N.size)
    return jnp.stack([jnp.sum(_mix(word_N, position_N, tensor_id, lane), dtype=jnp.uint32) for lane in range(LANES)])


def _mix(word_N: jax.Array, position_N: jax.Array, tensor_id: jax.Array, lane: int) -> jax.Array:
    key = tensor_id * jnp.uint32(TENSOR[lane]) + jnp.uint32(START[lane] & MASK)
    mixed = word_N * jnp.uint32(WORD[lane]) + position_N * jnp.uint32(POSITION[lane]) + key
    for shift, factor in FINALISER:
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed ^ (mixed >> LAST_SHIFT)
