"""The matmul kernel for few rows: the weights are wgmma's M operand, the tokens its N operand."""

# Dimension letters: T tokens, N output columns (rows of the weights), K reduction, R weight rows of a warpgroup,
# P columns of a product.

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, drain, fitting_stages, fold, fold_runs, sm_count, swizzled
from pallas_kernels.matmul.hopper_pipeline import add_bias, chain, fill
from pallas_kernels.matmul.hopper_weights import load_rows

ROWS = 64


@dataclasses.dataclass(frozen=True)
class SmallTile:
    """Shape of the work of one block. None of it moves a bit of the result; the gates prove that.

    ``warpgroups`` consumers take 64 weight rows each and share the tokens. ``parallel`` blocks of one cluster take
    neighbouring runs of leaves of the same rows and send their partial sums to the first block, which folds them.
    A product has at least ``columns`` columns, since wgmma takes longer for 16 or 24 of them than for 32. Those beyond
    the last token hold whatever shared memory held; no other column depends on them and none is kept. So it is with
    weight rows where a tile has fewer ``rows`` than the 64 that wgmma takes: more blocks then share the weights.
    """

    warpgroups: int = 1
    rows: int = ROWS
    depth: int = 128
    stages: int = 6
    parallel: int = 1
    columns: int = 32

    @property
    def block_columns(self) -> int:
        return self.rows * self.warpgroups


def small_matmul(
    T: int, N: int, K: int, *, leaves: int, bias: bool, out_dtype: str, tile: SmallTile, weight_parts: int = 1
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(x [T, K], w [N, K][, bias [N]]) -> out [T, N]`` for bfloat16 operands, T at most 256.

    With two ``weight_parts`` the weights are two operands, as `hopper_weights` makes them.
    Raises ValueError where T is no multiple of 8 (wgmma's step along N) or K has no whole number of steps a leaf.
    """
    if T % 8 or not 0 < T <= 256:
        raise ValueError(f"T={T} is not a multiple of 8 between 8 and 256")
    if N % 64:
        raise ValueError(f"N={N} is not a multiple of 64")
    if K % (leaves * tile.depth):
        raise ValueError(f"K={K} is not a multiple of leaves={leaves} times the {tile.depth} columns of one step")
    if tile.rows not in (16, 32, 48, ROWS):
        raise ValueError(f"rows={tile.rows} is not a multiple of 16 up to {ROWS}")
    if tile.rows < ROWS and (bias or tile.warpgroups > 1 or weight_parts > 1):
        raise ValueError(f"rows={tile.rows} are fewer than {ROWS}: for one warpgroup, weights in one part and no bias")
    if leaves % tile.parallel:
        raise ValueError(f"leaves={leaves} do not divide over {tile.parallel} blocks")
    block_rows = tile.block_columns
    if bias and N % block_rows:
        raise ValueError(f"N={N} is not a multiple of {block_rows}, and the bias is read in whole tiles")
    tiles = pl.cdiv(N, block_rows)
    leaf_steps = K // (leaves * tile.depth)
    my_leaves = leaves // tile.parallel
    steps = leaf_steps * my_leaves
    P = max(T, tile.columns)
    # Tokens that leave at once: of a tile that leaves some of its columns behind, those that lie together.
    step = T if tile.rows == ROWS else 8
    out_bytes = tile.warpgroups * T * ROWS * jnp.dtype(out_dtype).itemsize
    inbox_bytes = (tile.parallel - 1) * tile.warpgroups * ROWS * T * 4
    # More leaves than the compiler keeps streaming when they are unrolled: sums of four wait in shared memory.
    stashes = max(0, my_leaves.bit_length() - 3)
    stash_bytes = stashes * tile.warpgroups * ROWS * T * 4
    stage_bytes = 2 * tile.depth * (P + tile.warpgroups * ROWS)
    stages = fitting_stages(tile.stages, steps, stage_bytes, out_bytes + inbox_bytes + stash_bytes)

    def kernel(*refs: jax.Ref) -> None:
        refs_by_role = iter(refs)
        x_TK, weights = next(refs_by_role), [next(refs_by_role) for _ in range(weight_parts)]
        bias_N = next(refs_by_role) if bias else None
        out_TN, x_smem, w_smem, out_smem, full, empty = (next(refs_by_role) for _ in range(6))
        inbox, arrived = (next(refs_by_role), next(refs_by_role)) if tile.parallel > 1 else (None, None)
        stash = next(refs_by_role) if stashes else None
        warpgroup = lax.axis_index("warpgroup")
        member = lax.axis_index("member")

        @pl.when(warpgroup == tile.warpgroups)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))
            def _tiles(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row = info.index[0] * block_rows

                def start(k: jax.Array, slot: jax.Array) -> None:
                    along_k = pl.ds((member * steps + k) * tile.depth, tile.depth)
                    load_rows(weights, row, block_rows, along_k, w_smem.at[slot, pl.ds(0, block_rows)], full.at[slot])
                    plgpu.copy_gmem_to_smem(x_TK.at[:, along_k], x_smem.at[slot, pl.ds(0, T)], full.at[slot])

                return fill(steps, stages, carry, empty, start)

            drain(empty, stages, _tiles)

        @pl.when(warpgroup < tile.warpgroups)
        def _compute() -> None:
            mine = pl.ds(warpgroup * ROWS, ROWS)

            @plgpu.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))
            def _tiles(info: plgpu.NDLoopInfo, carry: jax.Array) -> jax.Array:
                row = info.index[0] * block_rows + warpgroup * ROWS

                def leaf(number: jax.Array | int) -> jax.Array:
                    def operands(slot: jax.Array) -> tuple[jax.Ref, jax.Ref]:
                        return w_smem.at[slot, mine], x_smem.at[slot].transpose((1, 0))

                    done = carry + number * leaf_steps
                    return chain((ROWS, P), leaf_steps, stages, done, full, empty, operands)[:, :T]

                def finish(total_RT: jax.Array) -> None:
                    total_RT = total_RT.astype(out_dtype)
                    if bias_N is not None:
                        total_RT = add_bias(total_RT, bias_N, row, 0)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    out_smem.at[warpgroup].transpose((1, 0))[...] = plgpu.layout_cast(
                        total_RT, plgpu.Layout.WGMMA_TRANSPOSED
                    )
                    plgpu.commit_smem()
                    for t in range(0, T, step):
                        part = out_smem.at[warpgroup, pl.ds(t, step), pl.ds(0, tile.rows)]
                        plgpu.copy_smem_to_gmem(part, out_TN.at[pl.ds(t, step), pl.ds(row, tile.rows)])

                waiting = [stash.at[level, warpgroup] for level in range(stashes)]
                partial_RT = fold_runs(leaf, my_leaves, (ROWS, T), waiting) if stashes else fold(leaf, my_leaves)
                if tile.parallel == 1:
                    finish(partial_RT)
                    return carry + steps

                @pl.when(member > 0)
                def _send() -> None:
                    plgpu.async_store_smem(
                        partial_RT,
                        inbox.at[member - 1, warpgroup],
                        arrived.at[warpgroup],
                        cluster_idx=jnp.int32(0),
                        cluster_dim="member",
                    )

                @pl.when(member == 0)
                def _receive() -> None:
                    plgpu.barrier_wait(arrived.at[warpgroup])

                    def part(number: int) -> jax.Array:
                        if number == 0:
                            return partial_RT
                        return plgpu.load(inbox.at[number - 1, warpgroup], layout=plgpu.Layout.WGMMA)

                    finish(fold(part, tile.parallel))

                return carry + steps

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    layout = swizzled(tile.depth)
    # A cluster's inbox is filled once, so with several blocks a tile there is no second tile.
    blocks = tiles if tile.parallel > 1 else min(tiles, sm_count())
    scratch = [
        plgpu.SMEM((stages, P, tile.depth), jnp.bfloat16, transforms=layout),
        plgpu.SMEM((stages, tile.warpgroups * ROWS, tile.depth), jnp.bfloat16, transforms=layout),
        plgpu.SMEM((tile.warpgroups, T, ROWS), jnp.dtype(out_dtype), transforms=swizzled(tile.rows, out_dtype)),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=stages),
    ]
    if tile.parallel > 1:
        shape = (tile.parallel - 1, tile.warpgroups, ROWS, T)
        scratch.append(plgpu.SMEM(shape, jnp.float32, transforms=swizzled(T, "float32")))
        scratch.append(plgpu.Barrier(num_arrivals=tile.parallel - 1, num_barriers=tile.warpgroups))
    if stashes:
        shape = (stashes, tile.warpgroups, ROWS, T)
        scratch.append(plgpu.SMEM(shape, jnp.float32, transforms=swizzled(T, "float32")))
    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, N), jnp.dtype(out_dtype)),),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(tile.parallel,),
        cluster_names=("member",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="isojax_matmul_small",
        scratch_types=tuple(scratch),
    )
