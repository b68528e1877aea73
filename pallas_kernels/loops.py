"""Loops that XLA:CPU can neither remove, unroll nor fuse with neighbours: what keeps a region's bits its own.

Every CPU form does its rounding inside the body of such a loop, over tiles of one fixed shape. The trip count is data
(`hidden_zero` is added to it), so XLA never sees a loop of one trip, which it would inline and fuse with neighbours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROW_TILE = 16


def hidden_zero(operand: jax.Array) -> jax.Array:
    """An int32 zero that the compiler must compute: the sign bit of a first element whose sign was cleared."""
    first = operand[(0,) * operand.ndim]
    if jnp.issubdtype(first.dtype, jnp.floating):
        first = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    return lax.shift_right_logical(first.astype(jnp.int32) & 0x7FFFFFFF, jnp.int32(31))


def pin(value: jax.Array, zero: jax.Array) -> jax.Array:
    """The same fp32 value, behind an integer `or` with a hidden zero.

    LLVM contracts a multiply and an add into one rounding, and XLA turns `1 / sqrt` into `rsqrt` and a division by a
    constant into a product. None of them reaches through the `or`, so a pinned value is rounded on its own.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) | zero, jnp.float32)


def isolated(function: Callable[..., Any], zero: jax.Array, *operands: jax.Array) -> Any:
    """`function(*operands)` as the body of a loop that runs once: nothing outside can fuse with it."""
    shapes = jax.eval_shape(function, *operands)
    empty = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    return lax.fori_loop(0, 1 + zero, lambda _, __: function(*operands), empty)


def tile_count(size: Any, tile: int) -> Any:
    """How many tiles cover `size`, which may be symbolic."""
    return (size + tile - 1) // tile


def pad_rows(array: jax.Array, tile: int) -> jax.Array:
    """Zero rows up to a whole tile, where a static row count of a tile or more needs none.

    A last, partial tile is moved back to end at the last row (`dynamic_slice` does so by itself): it computes some rows
    twice, to the same bits. Fewer rows than a tile, or a symbolic number of them, are padded.
    """
    rows = array.shape[0]
    if isinstance(rows, int) and rows >= tile:
        return array
    return jnp.pad(array, ((0, tile_count(rows, tile) * tile - rows), *((0, 0),) * (array.ndim - 1)))


def map_row_tiles(
    function: Callable[..., tuple[jax.Array, ...]],
    arrays: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    zero: jax.Array,
    tile: int = ROW_TILE,
) -> tuple[jax.Array, ...]:
    """Applies `function` to tiles of `tile` rows of `arrays`, one after the other.

    `results` gives the shape after the row axis and the dtype of each result. All arrays have the same row count.
    """
    rows = arrays[0].shape[0]
    padded = [pad_rows(array, tile) for array in arrays]
    outputs = tuple(jnp.zeros((padded[0].shape[0], *shape), dtype) for shape, dtype in results)

    def body(trip: jax.Array, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tiles = [lax.dynamic_slice_in_dim(array, trip * tile, tile) for array in padded]
        updates = function(*tiles)
        return tuple(
            lax.dynamic_update_slice_in_dim(output, update, trip * tile, 0)
            for output, update in zip(outputs, updates, strict=True)
        )

    trips = jnp.int32(tile_count(rows, tile)) + zero
    return tuple(output[:rows] for output in lax.fori_loop(0, trips, body, outputs))
