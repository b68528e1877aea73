"""Loops that XLA:CPU can neither remove, unroll, hoist from nor fuse with neighbours: a region's bits stay its own.

Every CPU form rounds only inside the body of such a loop. The trip count is data (a hidden zero is added to it), so
XLA never sees a loop of one trip, which it would inline. The operands of the body depend on the trip (through another
hidden zero), so XLA never finds the body invariant, which it would move out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounding import from_storage, narrow, storage, storage_dtype, widen

ROW_TILE = 16


def hidden_zero(operand: jax.Array) -> jax.Array:
    """An int32 zero that the compiler must compute: the sign bit of a first element whose sign was cleared."""
    first = storage(operand[(0,) * operand.ndim])
    bits = lax.bitcast_convert_type(first, jnp.int32) if first.dtype == jnp.float32 else first.astype(jnp.int32)
    return lax.shift_right_logical(bits & 0x7FFFFFFF, 31)


def trip_zero(trip: jax.Array) -> jax.Array:
    """An int32 zero that depends on the loop's trip: the sign bit of the counter."""
    return lax.shift_right_logical(trip.astype(jnp.int32), 31)


def pin(value: jax.Array, zero: jax.Array) -> jax.Array:
    """The same fp32 value, behind an integer `or` with a hidden zero.

    LLVM contracts a multiply and an add into one rounding, and XLA turns `1 / sqrt` into `rsqrt` and a division by a
    constant into a product. None of them reaches through the `or`, so a pinned value is rounded on its own.
    """
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) | zero, jnp.float32)


def constant(value: float, zero: jax.Array) -> jax.Array:
    """An fp32 scalar that the compiler cannot fold into its neighbours."""
    return pin(jnp.float32(value), zero)


def divide(dividend: jax.Array, divisor: jax.Array) -> jax.Array:
    """fp32 division, rounded once; the divisor may be broadcast.

    XLA rewrites a division by a broadcast as a product with the reciprocal, which rounds twice. So the broadcast
    divisor is merged with a zero that is hidden in every single element of the dividend.
    """
    bits = lax.bitcast_convert_type(dividend, jnp.int32)
    return dividend / pin(jnp.broadcast_to(divisor, dividend.shape), lax.shift_right_logical(bits & 0x7FFFFFFF, 31))


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
    tile: int = ROW_TILE,
) -> tuple[jax.Array, ...]:
    """Applies `function` to tiles of `tile` rows of `arrays`, one after the other.

    `function(zero, *tiles)` gets a hidden zero for its pins and the tiles, floats widened to fp32; it returns fp32
    tiles, which are rounded once to the dtypes in `results` (shape after the row axis, dtype). All arrays have the same
    number of rows, at least one.
    """
    rows = arrays[0].shape[0]
    zero = hidden_zero(arrays[0])
    padded = [pad_rows(storage(array), tile) for array in arrays]
    outputs = tuple(jnp.zeros((padded[0].shape[0], *shape), storage_dtype(dtype)) for shape, dtype in results)

    def body(trip: jax.Array, outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        own_zero = zero | trip_zero(trip)
        tiles = [widen(lax.dynamic_slice_in_dim(array, trip * tile, tile)) for array in padded]
        tiles = [pin(rows, own_zero) if rows.dtype == jnp.float32 else rows for rows in tiles]
        updates = function(own_zero, *tiles)
        return tuple(
            lax.dynamic_update_slice_in_dim(output, narrow(update, dtype), trip * tile, 0)
            for output, update, (_, dtype) in zip(outputs, updates, results, strict=True)
        )

    outputs = lax.fori_loop(0, jnp.int32(tile_count(rows, tile)) + zero, body, outputs)
    return tuple(from_storage(output[:rows], dtype) for output, (_, dtype) in zip(outputs, results, strict=True))
