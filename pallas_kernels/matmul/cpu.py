"""The matmul for XLA:CPU: fixed row and column tiles, K in leaves.

T tokens, N columns of the result, K depth; r a row tile, c a column tile.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.loops import ROW_TILE, hidden_zero, pad_rows, tile_count
from pallas_kernels.matmul.spec import COLUMN_TILE


def fold(leaves: list[jax.Array]) -> jax.Array:
    """The binary tree over fp32 leaves, lower index on the left."""
    while len(leaves) > 1:
        leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
    return leaves[0]


def tile_leaves(x_rK: jax.Array, w_cK: jax.Array, leaves: int) -> list[jax.Array]:
    """One fp32 tile per leaf of K: the only place where a dot is written, so all regions share its bits."""
    depth = x_rK.shape[1] // leaves
    # Widening is exact. XLA:CPU sums a bf16 dot in another order, so stored and widened weights must meet in fp32.
    x_rK, w_cK = x_rK.astype(jnp.float32), w_cK.astype(jnp.float32)
    contract_last = (((1,), (1,)), ((), ()))
    return [
        lax.dot_general(
            lax.slice_in_dim(x_rK, leaf * depth, (leaf + 1) * depth, axis=1),
            lax.slice_in_dim(w_cK, leaf * depth, (leaf + 1) * depth, axis=1),
            contract_last,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        for leaf in range(leaves)
    ]


def matmul(
    x_TK: jax.Array, w_NK: jax.Array, bias_N: jax.Array | None = None, *, leaves: int, out_dtype: str
) -> tuple[jax.Array]:
    """The region's CPU form."""
    tokens, columns = x_TK.shape[0], w_NK.shape[0]
    if tokens == 0:
        return (jnp.zeros((0, columns), out_dtype),)
    zero = hidden_zero(x_TK)
    x, w = pad_rows(x_TK, ROW_TILE), pad_rows(w_NK, COLUMN_TILE)
    bias = None if bias_N is None else pad_rows(bias_N, COLUMN_TILE).astype(jnp.float32)

    def column_tile(column: jax.Array, y: jax.Array) -> jax.Array:
        w_cK = lax.dynamic_slice_in_dim(w, column * COLUMN_TILE, COLUMN_TILE).astype(jnp.float32)

        def row_tile(row: jax.Array, y: jax.Array) -> jax.Array:
            x_rK = lax.dynamic_slice_in_dim(x, row * ROW_TILE, ROW_TILE)
            y_rc = fold(tile_leaves(x_rK, w_cK, leaves)).astype(out_dtype)
            if bias is not None:
                bias_c = lax.dynamic_slice_in_dim(bias, column * COLUMN_TILE, COLUMN_TILE)
                y_rc = (y_rc.astype(jnp.float32) + bias_c).astype(out_dtype)
            return lax.dynamic_update_slice(y, y_rc, (row * ROW_TILE, column * COLUMN_TILE))

        return lax.fori_loop(0, jnp.int32(tile_count(tokens, ROW_TILE)) + zero, row_tile, y)

    y = jnp.zeros((x.shape[0], w.shape[0]), out_dtype)
    y = lax.fori_loop(0, jnp.int32(tile_count(columns, COLUMN_TILE)) + zero, column_tile, y)
    return (y[:tokens, :columns],)
