"""Weights of any number of rows: TMA takes tiles of whole eights, so the last rows come from a padded copy."""

# Dimension letters: N rows of the weights, K reduction.

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_rows import Row
from pallas_kernels.hopper_tools import chained_kernel

#: Rows of the copy. Every kernel's tile of weight rows divides it, so no tile has rows of both.
TAIL_ROWS = 256
#: Rows of one tile of shared memory as wgmma reads it.
TILE_ROWS = 8


def tail_start(N: int) -> int:
    """The first weight row that a copy must hold; those before it are read where they are."""
    return N // TAIL_ROWS * TAIL_ROWS


def tail_kernel(N: int, K: int) -> Callable[..., tuple[jax.Array, ...]]:
    """``w [N, K] -> tail [TAIL_ROWS, K]``: the rows from `tail_start` on, then zeros."""
    row_of = Row(K)
    first, last = tail_start(N), N - 1

    def kernel(w_NK: jax.Ref, tail: jax.Ref, *scratch: jax.Ref) -> None:
        row = lax.axis_index("row")
        (value_K,) = row_of.load([(w_NK, jnp.minimum(first + row, last))], scratch)
        inside = lax.broadcast_in_dim(last - first - row, value_K.shape, ()) >= 0
        row_of.store(jnp.where(inside, value_K, 0.0), tail, row, scratch, 0)

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((TAIL_ROWS, K), jnp.bfloat16),),
        grid=(TAIL_ROWS,),
        grid_names=("row",),
        kernel_name="isojax_weight_tail",
        scratch_types=row_of.scratch(1),
    )


def load_rows(
    parts: Sequence[jax.Ref],
    row: jax.Array,
    rows: int,
    columns: pl.Slice,
    into: jax.Ref,
    barrier: jax.Ref,
    collective_axes: str | None = None,
) -> None:
    """Starts the copy of ``rows`` weight rows from ``row`` on into shared memory; missing rows are zeros.

    ``parts`` is the weights, or their whole part and its tail. One copy is started in either case.
    """

    def copy(part: jax.Ref, first: jax.Array) -> None:
        plgpu.copy_gmem_to_smem(part.at[pl.ds(first, rows), columns], into, barrier, collective_axes=collective_axes)

    if len(parts) == 1:
        copy(parts[0], row)
        return
    whole, tail = parts
    start = whole.shape[0]

    @pl.when(row < start)
    def _whole() -> None:
        copy(whole, row)

    @pl.when(row >= start)
    def _tail() -> None:
        copy(tail, row - start)
