"""The matmul for XLA:CPU: row tiles against the whole weight, K in leaves.

T tokens, N columns of the result, K depth; r a row tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.loops import map_row_tiles, pin, tile_count, trip_zero
from pallas_kernels.matmul.spec import COLUMN_TILE, ROW_TILES
from pallas_kernels.rounding import round_to, widen


def row_tile(rows: object) -> int:
    """The rows of one dot: the smallest tile that holds all, or the largest; the largest for a symbolic number."""
    return next((tile for tile in ROW_TILES if isinstance(rows, int) and rows <= tile), ROW_TILES[-1])


def pad_columns(w: jax.Array) -> jax.Array:
    """Zero columns of the result up to a multiple of 64: other widths would be summed in another order."""
    columns = w.shape[0]
    return jnp.pad(w, ((0, tile_count(columns, COLUMN_TILE) * COLUMN_TILE - columns), *((0, 0),) * (w.ndim - 1)))


def chain_dot(x_rK: jax.Array, w_NK: jax.Array) -> jax.Array:
    """One leaf, fp32: the only place where a matmul's dot is written. Needs at least 2 rows and 64 i columns."""
    contract_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_rK, w_NK, contract_last, lax.Precision.HIGHEST, jnp.float32)


def fold(leaves: list[jax.Array]) -> jax.Array:
    """The binary tree over fp32 leaves, lower index on the left."""
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def leaf_dots(x_rK: jax.Array, w_NK: jax.Array, leaves: int, zero: jax.Array) -> list[jax.Array]:
    """One fp32 tile per leaf of K."""
    depth = x_rK.shape[1] // leaves
    pieces = [slice(leaf * depth, (leaf + 1) * depth) for leaf in range(leaves)]
    # The pin keeps a following add out of the dot, where it could become the start of the chain.
    return [pin(chain_dot(x_rK[:, piece], w_NK[:, piece]), zero) for piece in pieces]


def fold_leaf_dots(x_rK: jax.Array, w_NK: jax.Array, leaves: int, zero: jax.Array) -> jax.Array:
    """The root of the tree over all leaves, fp32 [r, N]."""
    return fold(leaf_dots(x_rK, w_NK, leaves, zero))


def leaf_dots_by_columns(x_rK: jax.Array, w_NK: jax.Array, leaves: int, zero: jax.Array) -> jax.Array:
    """The same, 64 columns at a time: XLA copies a leaf of the weight for its dot, and this copy stays in the cache."""
    columns, depth = w_NK.shape

    def tile(number: jax.Array, y_rN: jax.Array) -> jax.Array:
        w_cK = lax.dynamic_slice(w_NK, (number * COLUMN_TILE, 0), (COLUMN_TILE, depth))
        y_rc = fold_leaf_dots(x_rK, w_cK, leaves, zero | trip_zero(number))
        return lax.dynamic_update_slice(y_rN, y_rc, (0, number * COLUMN_TILE))

    empty = jnp.zeros((x_rK.shape[0], columns), jnp.float32)
    return lax.fori_loop(0, columns // COLUMN_TILE + zero, tile, empty)


def matmul(
    x_TK: jax.Array, w_NK: jax.Array, bias_N: jax.Array | None = None, *, leaves: int, out_dtype: str
) -> tuple[jax.Array]:
    """The region's CPU form."""
    tokens, columns = x_TK.shape[0], w_NK.shape[0]
    if tokens == 0 or columns == 0:
        return (jnp.zeros((tokens, columns), out_dtype),)
    w = pad_columns(widen(w_NK))
    bias = None if bias_N is None else pad_columns(widen(bias_N))

    rows = row_tile(tokens)
    dots = leaf_dots_by_columns if leaves > 1 and rows < ROW_TILES[-1] else fold_leaf_dots

    def tile(zero: jax.Array, x_rK: jax.Array) -> tuple[jax.Array]:
        y_rN = dots(x_rK, w, leaves, zero)
        return (y_rN if bias is None else round_to(y_rN, out_dtype) + bias,)

    (y,) = map_row_tiles(tile, [x_TK], [((w.shape[0],), out_dtype)], rows)
    return (y[:, :columns],)
