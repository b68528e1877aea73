"""Widening, rounding and summing in a declared order, written so that no compiler pass can change them.

bfloat16 is handled as 16-bit words: XLA:CPU computes bfloat16 moves in fp32, drops a pair of casts, and has several
conversions that differ in subnormals and NaN. Integer arithmetic has one meaning.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LANES = 64
FLOATS = ("bfloat16", "float32")


def check_floats(region: str, **dtypes: Any) -> None:
    """Raises ValueError unless every dtype is one that regions compute in."""
    for name, dtype in dtypes.items():
        if str(dtype) not in FLOATS:
            raise ValueError(f"{region}: {name} is {dtype}; allowed: {', '.join(FLOATS)}")


def storage(array: jax.Array) -> jax.Array:
    """A bfloat16 array as its 16-bit words; any other array as it is."""
    return lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def storage_dtype(dtype: Any) -> Any:
    """The dtype that `storage` gives for an array of `dtype`."""
    return jnp.uint16 if jnp.dtype(dtype) == jnp.bfloat16 else dtype


def from_storage(words: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `storage`."""
    return lax.bitcast_convert_type(words, jnp.bfloat16) if jnp.dtype(dtype) == jnp.bfloat16 else words


def widen(words: jax.Array) -> jax.Array:
    """fp32 values of 16-bit words, exactly; fp32 and integer arrays as they are."""
    words = storage(words)
    if words.dtype != jnp.uint16:
        return words
    return lax.bitcast_convert_type(words.astype(jnp.int32) << 16, jnp.float32)


def narrow(value: jax.Array, dtype: Any) -> jax.Array:
    """Rounds fp32 to `dtype`, to nearest even, and returns its storage. NaN stays NaN, subnormals stay."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return value.astype(dtype)
    return lax.shift_right_logical(_rounded_bits(value), 16).astype(jnp.uint16)


def round_to(value: jax.Array, dtype: Any) -> jax.Array:
    """Rounds fp32 to `dtype` and keeps it in fp32: an intermediate rounding point."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return value
    return lax.bitcast_convert_type(_rounded_bits(value), jnp.float32)


def _rounded_bits(value: jax.Array) -> jax.Array:
    """fp32 bits of the nearest bfloat16; 32-bit arithmetic throughout, which LLVM turns into vectors."""
    bits = lax.bitcast_convert_type(value, jnp.int32)
    rounded = bits + (0x7FFF + (lax.shift_right_logical(bits, 16) & 1))
    quiet_nan = bits | 0x400000
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return jnp.where(is_nan, quiet_nan, rounded) & jnp.int32(-0x10000)


def lane_sums(x: jax.Array) -> jax.Array:
    """[..., n] to [..., 64]: lane i adds elements i, i + 64, i + 128, ... in this order; zeros fill the last."""
    size = x.shape[-1]
    if size % LANES:
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, LANES - size % LANES),))
    total = x[..., :LANES]
    for start in range(LANES, x.shape[-1], LANES):
        total = total + x[..., start : start + LANES]
    return total


def fold_lanes(lanes: jax.Array) -> jax.Array:
    """[..., 64] to [...]: adds the upper half to the lower half until one lane is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def row_sum(x: jax.Array) -> jax.Array:
    """The sum over the last axis in the declared order: 64 lanes, then halves.

    XLA's own reduce picks its order by the whole shape, so a row's sum would depend on how many rows there are.
    """
    return fold_lanes(lane_sums(x))
