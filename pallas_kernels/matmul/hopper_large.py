"""The matmul kernel for many rows: wgmma over 64-row warpgroup tiles, TMA stages, a persistent grid."""

# Dimension letters: T tokens, N output columns, K reduction, S pipeline stages, W consumer warpgroups.

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, drain, fitting_stages, fold_runs, sm_count, swizzled
from pallas_kernels.matmul.hopper_pipeline import add_bias, chain, fill
from pallas_kernels.matmul.hopper_weights import load_rows

CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class LargeTile:
    """Shape of the work of one block. None of it moves a bit of the result; the gates prove that.

    ``rows`` and ``columns`` are one warpgroup's tile; the two consumer warpgroups sit side by side along ``split``
    ("rows" or "columns"). ``group`` row tiles are walked together, so that they share weights in the L2 cache.
    Registers fold a ``run`` of leaves. With ``cluster`` of 2, two blocks with neighbouring row tiles share every weight
    tile by multicast.
    """

    rows: int = 64
    columns: int = 128
    split: str = "rows"
    depth: int = 64
    stages: int = 10
    group: int = 8
    cluster: int = 1
    run: int = 4

    @property
    def block_rows(self) -> int:
        return self.rows * (2 if self.split == "rows" else 1)

    @property
    def block_columns(self) -> int:
        return self.columns * (2 if self.split == "columns" else 1)


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What a block does with its tile instead of writing it: ``consume(tile, operands, results, row, column)``.

    ``tile`` is one warpgroup's float32 tile, whose first row and column are given; ``operands`` are the kernel's
    further operands, ``operand_count`` of them, and ``results`` what it writes.
    """

    consume: Callable[[jax.Array, list[jax.Ref], list[jax.Ref], jax.Array, jax.Array], None]
    operand_count: int
    results: tuple[jax.ShapeDtypeStruct, ...]


def tile_order(index: jax.Array, row_tiles: int, column_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Walks the tiles in bands of ``group`` row tiles, down a band's rows first."""
    band_size = group * column_tiles
    band = lax.div(index, jnp.int32(band_size))
    within = lax.rem(index, jnp.int32(band_size))
    height = jnp.minimum(jnp.int32(group), jnp.int32(row_tiles) - band * group)
    return band * group + lax.rem(within, height), lax.div(within, height)


def large_matmul(
    T: int,
    N: int,
    K: int,
    *,
    leaves: int,
    bias: bool,
    out_dtype: str,
    tile: LargeTile,
    weight_parts: int = 1,
    epilogue: Epilogue | None = None,
    combine: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(x [T, K], w [N, K][, bias [N]]) -> out [T, N]`` for bfloat16 operands.

    K is cut into ``leaves`` leaves, each one wgmma chain from zero, folded depth first as the declared tree. With an
    ``epilogue`` the kernel is ``(x, w, *operands) -> results`` and no tile is written. With two ``weight_parts`` the
    weights are two operands, as `hopper_weights` makes them. With ``combine`` the weights are two matrices below each
    other, [2 * N, K], and the result is ``combine`` of both products, float32 in and out, elementwise.
    Raises ValueError where K does not divide into whole steps of every leaf.
    """
    if N % 64:
        raise ValueError(f"N={N} is not a multiple of 64")
    if K % (leaves * tile.depth):
        raise ValueError(f"K={K} is not a multiple of leaves={leaves} times the {tile.depth} columns of one step")
    if bias and N % tile.block_columns:
        raise ValueError(f"N={N} is not a multiple of {tile.block_columns}, and the bias is read in whole tiles")
    if combine and (tile.split != "rows" or epilogue or bias):
        raise ValueError("two products meet in one warpgroup's tile, and nothing else is done with them")
    halves = 2 if combine else 1
    # Columns of the result: with two products a tile's other half is the second one's.
    width = tile.block_columns // halves
    row_tiles, column_tiles = pl.cdiv(T, tile.block_rows * tile.cluster), pl.cdiv(N, width)
    leaf_steps = K // (leaves * tile.depth)
    steps = leaf_steps * leaves
    # The result leaves through shared memory in pieces of 64 rows and 128 bytes, two in flight where they fit.
    widest = 128 // jnp.dtype(out_dtype).itemsize
    out_columns = tile.columns // halves
    piece = next(size for size in (widest, widest // 2, widest // 4) if out_columns % size == 0)
    stage_bytes = 2 * tile.depth * (tile.block_rows + tile.block_columns)
    # Sums that do not fit the registers wait in shared memory, a level of the tree each.
    stashes = max(0, leaves.bit_length() - tile.run.bit_length())
    stash_bytes = stashes * CONSUMERS * tile.rows * tile.columns * 4
    slots = 1 if stashes else 2
    out_bytes = CONSUMERS * slots * 64 * piece * jnp.dtype(out_dtype).itemsize
    stages = fitting_stages(tile.stages, steps, stage_bytes, out_bytes + stash_bytes)

    def kernel(*refs: jax.Ref) -> None:
        refs_by_role = iter(refs)
        x_TK, weights = next(refs_by_role), [next(refs_by_role) for _ in range(weight_parts)]
        bias_N = next(refs_by_role) if bias else None
        further = [next(refs_by_role) for _ in range(epilogue.operand_count)] if epilogue else []
        results = [next(refs_by_role) for _ in range(len(epilogue.results) if epilogue else 1)]
        x_smem, w_smem, out_smem, full, empty = (next(refs_by_role) for _ in range(5))
        stash = next(refs_by_role) if stashes else None
        warpgroup = lax.axis_index("warpgroup")
        member = lax.axis_index("member")

        def tile_origin(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            row, column = tile_order(index, row_tiles, column_tiles, tile.group)
            return (row * tile.cluster + member) * tile.block_rows, column * width

        @pl.when(warpgroup == CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.nd_loop((row_tiles * column_tiles,), collective_axes="block", init_carry=jnp.int32(0))
            def _tiles(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row, column = tile_origin(info.index[0])

                def start(k: jax.Array, slot: jax.Array) -> None:
                    along_k = pl.ds(k * tile.depth, tile.depth)
                    rows = pl.ds(row, tile.block_rows)
                    plgpu.copy_gmem_to_smem(x_TK.at[rows, along_k], x_smem.at[slot], full.at[slot])
                    for half in range(halves):
                        load_rows(
                            weights,
                            column + half * N,
                            width,
                            along_k,
                            w_smem.at[slot, pl.ds(half * width, width)],
                            full.at[slot],
                            collective_axes="member" if tile.cluster > 1 else None,
                        )

                return fill(steps, stages, carry, empty, start)

            drain(empty, stages, _tiles)

        @pl.when(warpgroup < CONSUMERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            along_rows = tile.split == "rows"
            my_rows = pl.ds(warpgroup * tile.rows, tile.rows) if along_rows else pl.ds(0, tile.rows)
            my_columns = pl.ds(0, tile.columns) if along_rows else pl.ds(warpgroup * tile.columns, tile.columns)

            @plgpu.nd_loop((row_tiles * column_tiles,), collective_axes="block", init_carry=jnp.int32(0))
            def _tiles(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row, column = tile_origin(info.index[0])

                def leaf(number: jax.Array | int) -> jax.Array:
                    def operands(slot: jax.Array) -> tuple[jax.Ref, jax.Ref]:
                        return x_smem.at[slot, my_rows], w_smem.at[slot, my_columns].transpose((1, 0))

                    shape = (tile.rows, tile.columns)
                    return chain(shape, leaf_steps, stages, carry + number * leaf_steps, full, empty, operands)

                waiting = [stash.at[level, warpgroup] for level in range(stashes)]
                total = fold_runs(leaf, leaves, (tile.rows, tile.columns), waiting, tile.run)
                out_row = row + (warpgroup * tile.rows if along_rows else 0)
                out_column = column + (0 if along_rows else warpgroup * tile.columns)
                if combine:
                    total = combine(total[:, :width], total[:, width:])
                if epilogue is not None:
                    epilogue.consume(total, further, results, out_row, out_column)
                    return carry + steps
                total = total.astype(out_dtype)
                if bias_N is not None:
                    total = add_bias(total, bias_N, out_column, 1)
                for number, (r, c) in enumerate(
                    itertools.product(range(0, tile.rows, 64), range(0, out_columns, piece))
                ):
                    slot = out_smem.at[warpgroup, number % slots]
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    slot[...] = total[r : r + 64, c : c + piece]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(slot, results[0].at[pl.ds(out_row + r, 64), pl.ds(out_column + c, piece)])
                return carry + steps

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    layout = swizzled(tile.depth)
    out_layout = swizzled(piece, out_dtype)
    blocks = min(row_tiles * column_tiles, sm_count() // tile.cluster)
    if tile.cluster > 1:
        # A multicast load writes into both blocks, so a stage is free only once both blocks' consumers left it.
        empty = plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=CONSUMERS, num_barriers=stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages)
    scratch = [
        plgpu.SMEM((stages, tile.block_rows, tile.depth), jnp.bfloat16, transforms=layout),
        plgpu.SMEM((stages, tile.block_columns, tile.depth), jnp.bfloat16, transforms=layout),
        plgpu.SMEM((CONSUMERS, slots, 64, piece), jnp.dtype(out_dtype), transforms=out_layout),
        plgpu.Barrier(num_arrivals=1 + halves, num_barriers=stages),
        empty,
    ]
    if stashes:
        shape = (stashes, CONSUMERS, tile.rows, tile.columns)
        scratch.append(plgpu.SMEM(shape, jnp.float32, transforms=swizzled(tile.columns, "float32")))
    return chained_kernel(
        kernel,
        out_type=epilogue.results if epilogue else (jax.ShapeDtypeStruct((T, N), jnp.dtype(out_dtype)),),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("member",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="isojax_gated_matmul_large" if combine else "isojax_matmul_large",
        scratch_types=tuple(scratch),
    )
