"""The matmul kernel for some hundred rows: the blocks of a cluster share the leaves of a tile, and its fold."""

# Dimension letters: T tokens, N output columns, K reduction, S columns that one block of a cluster folds.

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, drain, fitting_stages, fold, fold_runs, sm_count, swizzled
from pallas_kernels.matmul.hopper_large import CONSUMERS, tile_order
from pallas_kernels.matmul.hopper_pipeline import add_bias, chain, fill
from pallas_kernels.matmul.hopper_weights import load_rows

ROWS = 64
#: Leaves that a block sums in registers.
MOST_LEAVES = 4
#: Clusters of this many blocks or fewer fill the card. Its multiprocessors come in groups of 16 or 18, so larger ones
#: leave some idle, and one cluster more than there is room for would wait for a whole round.
FILLING = 2
#: Multiprocessors that larger clusters are sure to find.
WHOLE_GROUPS = 128


@dataclasses.dataclass(frozen=True)
class ClusterTile:
    """Shape of the work of one cluster. None of it moves a bit of the result; the gates prove that.

    ``parallel`` blocks of a cluster take neighbouring runs of leaves of one tile, and send one another the columns
    that each of them folds. Two warpgroups of 64 rows and ``columns`` sit side by side along ``split`` ("rows" or
    "columns"). ``group`` row tiles are walked together.
    """

    parallel: int = 2
    columns: int = 128
    split: str = "rows"
    depth: int = 64
    stages: int = 8
    group: int = 8

    @property
    def block_rows(self) -> int:
        return ROWS * (CONSUMERS if self.split == "rows" else 1)

    @property
    def block_columns(self) -> int:
        return self.columns * (CONSUMERS if self.split == "columns" else 1)

    @property
    def slice(self) -> int:
        """Columns of a warpgroup's tile that one block of the cluster folds and writes."""
        return self.columns // self.parallel


def cluster_matmul(
    T: int, N: int, K: int, *, leaves: int, bias: bool, out_dtype: str, tile: ClusterTile, weight_parts: int = 1
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(x [T, K], w [N, K][, bias [N]]) -> out [T, N]`` for bfloat16 operands.

    With two ``weight_parts`` the weights are two operands, as `hopper_weights` makes them.
    Raises ValueError where K has no whole number of steps a leaf, or the leaves do not fit the cluster's registers.
    """
    if N % 64:
        raise ValueError(f"N={N} is not a multiple of 64")
    if K % (leaves * tile.depth):
        raise ValueError(f"K={K} is not a multiple of leaves={leaves} times the {tile.depth} columns of one step")
    if bias and N % tile.block_columns:
        raise ValueError(f"N={N} is not a multiple of {tile.block_columns}, and the bias is read in whole tiles")
    my_leaves = leaves // tile.parallel
    if leaves % tile.parallel or my_leaves > MOST_LEAVES:
        raise ValueError(f"leaves={leaves} do not divide over {tile.parallel} blocks of at most {MOST_LEAVES} each")
    row_tiles, column_tiles = pl.cdiv(T, tile.block_rows), pl.cdiv(N, tile.block_columns)
    leaf_steps = K // (leaves * tile.depth)
    steps = leaf_steps * my_leaves
    slice_elements = CONSUMERS * ROWS * tile.slice
    other_bytes = slice_elements * (4 * tile.parallel + jnp.dtype(out_dtype).itemsize)
    stage_bytes = 2 * tile.depth * (tile.block_rows + tile.block_columns)
    stages = fitting_stages(tile.stages, steps, stage_bytes, other_bytes)

    def kernel(*refs: jax.Ref) -> None:
        names = iter(refs)
        x_TK, weights = next(names), [next(names) for _ in range(weight_parts)]
        bias_N = next(names) if bias else None
        out_TN, x_smem, w_smem, inbox, out_smem, full, empty, arrived, taken = names
        warpgroup, member = lax.axis_index("warpgroup"), lax.axis_index("member")

        def tile_origin(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            row, column = tile_order(index, row_tiles, column_tiles, tile.group)
            return row * tile.block_rows, column * tile.block_columns

        @pl.when(warpgroup == CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.nd_loop((row_tiles * column_tiles,), collective_axes="cluster", init_carry=jnp.int32(0))
            def _tiles(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row, column = tile_origin(info.index[0])

                def start(k: jax.Array, slot: jax.Array) -> None:
                    along_k = pl.ds((member * steps + k) * tile.depth, tile.depth)
                    rows = pl.ds(row, tile.block_rows)
                    load_rows(weights, column, tile.block_columns, along_k, w_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(x_TK.at[rows, along_k], x_smem.at[slot], full.at[slot])

                return fill(steps, stages, carry, empty, start)

            drain(empty, stages, _tiles)

        @pl.when(warpgroup < CONSUMERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            along_rows = tile.split == "rows"
            my_rows = pl.ds(warpgroup * ROWS, ROWS) if along_rows else pl.ds(0, ROWS)
            my_columns = pl.ds(0, tile.columns) if along_rows else pl.ds(warpgroup * tile.columns, tile.columns)

            @plgpu.nd_loop((row_tiles * column_tiles,), collective_axes="cluster", init_carry=jnp.int32(0))
            def _(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row, column = tile_origin(info.index[0])

                def leaf(number: jax.Array | int) -> jax.Array:
                    def operands(slot: jax.Array) -> tuple[jax.Ref, jax.Ref]:
                        return x_smem.at[slot, my_rows], w_smem.at[slot, my_columns].transpose((1, 0))

                    shape = (ROWS, tile.columns)
                    return chain(shape, leaf_steps, stages, carry + number * leaf_steps, full, empty, operands)

                partial = fold_runs(leaf, my_leaves, (ROWS, tile.columns), ())

                @pl.when(carry > 0)
                def _() -> None:
                    # Every block must have read what it was sent for the tile before.
                    plgpu.barrier_wait(taken.at[warpgroup])

                pieces = [partial[:, at : at + tile.slice] for at in range(0, tile.columns, tile.slice)]
                for receiver, piece in enumerate(pieces):

                    @pl.when(member != receiver)
                    def _(receiver: int = receiver, piece: jax.Array = piece) -> None:
                        plgpu.async_store_smem(
                            piece,
                            inbox.at[member, warpgroup],
                            arrived.at[warpgroup],
                            cluster_idx=jnp.int32(receiver),
                            cluster_dim="member",
                        )

                plgpu.barrier_wait(arrived.at[warpgroup])

                def part(number: int) -> jax.Array:
                    def sent() -> jax.Array:
                        return plgpu.load(inbox.at[number, warpgroup], layout=plgpu.Layout.WGMMA)

                    return lax.cond(member == number, lambda: pieces[number], sent)

                total = fold(part, tile.parallel)
                # All threads of the warpgroup must have read it.
                plgpu.commit_smem()
                plgpu.barrier_arrive(taken.at[warpgroup])
                total = total.astype(out_dtype)
                out_row = row + (warpgroup * ROWS if along_rows else 0)
                out_column = column + member * tile.slice + (0 if along_rows else warpgroup * tile.columns)
                if bias_N is not None:
                    total = add_bias(total, bias_N, out_column, 1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[warpgroup] = total
                plgpu.commit_smem()
                columns = pl.ds(out_column, tile.slice)
                plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], out_TN.at[pl.ds(out_row, ROWS), columns])
                return carry + steps

            # A block that left earlier could not be told by its peers that they have read.
            plgpu.barrier_wait(taken.at[warpgroup])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    clusters = (sm_count() if tile.parallel <= FILLING else WHOLE_GROUPS) // tile.parallel
    layout = swizzled(tile.depth)
    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, N), jnp.dtype(out_dtype)),),
        grid=(min(row_tiles * column_tiles, clusters),),
        grid_names=("cluster",),
        cluster=(tile.parallel,),
        cluster_names=("member",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="isojax_matmul_cluster",
        scratch_types=(
            plgpu.SMEM((stages, tile.block_rows, tile.depth), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, tile.block_columns, tile.depth), jnp.bfloat16, transforms=layout),
            plgpu.SMEM(
                (tile.parallel, CONSUMERS, ROWS, tile.slice), jnp.float32, transforms=swizzled(tile.slice, "float32")
            ),
            plgpu.SMEM((CONSUMERS, ROWS, tile.slice), jnp.dtype(out_dtype), transforms=swizzled(tile.slice, out_dtype)),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=tile.parallel - 1, num_barriers=CONSUMERS),
            plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=1, num_barriers=CONSUMERS),
        ),
    )
