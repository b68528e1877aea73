"""Attention for single query tokens over paged keys on sm90: a block takes the query heads of one key head."""

# Dimension letters: T tokens, H query heads, K key heads, G query heads of a key head, D head size, S splits,
# R rows of a warpgroup (the first G are query heads, the others idle), B positions of a block.

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule, State
from pallas_kernels.attention.hopper_source import Paged, zero_rows
from pallas_kernels.hopper_tools import drain, swizzled


def is_single(owners_T: jax.Ref, token: jax.Array, T: int) -> jax.Array:
    """Whether ``token`` is the only one of its request in the batch; false for padding."""
    owner = owners_T[token]
    before = owners_T[jnp.maximum(token - 1, 0)]
    after = owners_T[jnp.minimum(token + 1, T - 1)]
    return (owner >= 0) & ((token == 0) | (before != owner)) & ((token == T - 1) | (after != owner))


def decode_attention(
    T: int,
    H: int,
    K: int,
    schedule: Schedule,
    source: Paged,
    splits: int,
    *,
    lanes: int,
    tiled: bool = False,
    stages: int = 2,
    staged_weights: bool = False,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(q [T*H, D], k, v, positions [T], owners [T], block_table[, tiled [T*H, D]]) -> results``.

    With one lane a block walks all splits of its token and the result is ``out [T*H, D]``; rows of tokens that are not
    single are taken from ``tiled`` where it is given, and are zero otherwise. With more, ``lanes`` blocks take every
    ``lanes``-th split each and the results are the states of the splits, ``acc [T*splits*H, D]`` and
    ``stats [T*splits*K, 2, R]`` (maximum and sum), in float32; `combine_splits` merges them. ``splits`` is the most
    that a token can have.
    """
    D, B = schedule.D, schedule.block
    G = H // K
    if G > ROWS:
        raise ValueError(f"{G} query heads share a key head; at most {ROWS} fit a warpgroup")
    split_blocks = schedule.split // B
    if D > 128:
        # Larger heads leave no room for a second stage.
        stages = 1

    def kernel(*refs: jax.Ref) -> None:
        names = iter(refs)
        q_RD, k_C, v_C, positions_T, owners_T, table = (next(names) for _ in range(6))
        tiled_RD = next(names) if tiled else None
        results = [next(names) for _ in range(1 if lanes == 1 else 2)]
        q_plain, q_smem, k_smem, v_smem, out_smem, stats_smem = (next(names) for _ in range(6))
        q_full, k_full, v_full, v_dirty, v_clean, k_empty, v_empty, copied = (next(names) for _ in range(8))
        staged = next(names, None)
        warpgroup, key_head, lane = (lax.axis_index(name) for name in ("warpgroup", "key_head", "lane"))
        token = lax.axis_index("token")
        first_head = token * H + key_head * G
        single = is_single(owners_T, token, T)
        last = positions_T[token]
        blocks = lax.div(last, jnp.int32(B)) + 1
        used = jnp.where(single, lax.div(blocks - 1, jnp.int32(split_blocks)) + 1, 0)
        # Splits lane, lane + lanes, ... below ``used``.
        mine = lax.div(jnp.maximum(used - lane + lanes - 1, 0), jnp.int32(lanes))

        def bounds(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            split = lane + number * lanes
            first = split * split_blocks
            return split, first, jnp.minimum(first + split_blocks, blocks)

        @pl.when(warpgroup == 1)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            columns = pl.ds(key_head * D, D)
            plgpu.copy_gmem_to_smem(q_RD.at[pl.ds(first_head, ROWS)], q_plain, q_full)

            def one_split(number: jax.Array, done: jax.Array) -> jax.Array:
                _, first, end = bounds(number)

                def one_block(block: jax.Array, done: jax.Array) -> jax.Array:
                    slot = lax.rem(done, jnp.int32(stages))
                    rows = source.rows(table, owners_T[token], jnp.int32(0), block * B, last)

                    @pl.when(done >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(k_empty.at[slot])

                    source.load(k_C, rows, columns, k_smem.at[slot], k_full.at[slot])

                    @pl.when(done >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(v_empty.at[slot])

                    @pl.when(block < blocks - 1)
                    def _() -> None:
                        source.load(v_C, rows, columns, v_smem.at[slot], v_full.at[slot])

                    @pl.when(block == blocks - 1)
                    def _() -> None:
                        source.load(v_C, rows, columns, v_smem.at[slot], v_dirty)
                        plgpu.barrier_wait(v_dirty)
                        zero_rows(v_smem.at[slot], last + 1 - block * B, B, D)
                        plgpu.barrier_arrive(v_clean)

                    return done + 1

                return lax.fori_loop(first, end, one_block, done)

            done = lax.fori_loop(0, mine, one_split, jnp.int32(0))
            drain(k_empty, stages, done)
            drain(v_empty, stages, done)

        @pl.when(warpgroup == 0)
        def _compute() -> None:
            plgpu.barrier_wait(q_full)
            # A copy into wgmma's swizzled layout would have to start at a multiple of 8 heads.
            q_smem[...] = plgpu.load(q_plain, layout=softmax.WGMMA, optimized=False)
            plgpu.commit_smem()
            nothing = softmax.empty_state(D)

            def one_block(block: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
                done, state = carry[0], State(*carry[1:])
                slot = lax.rem(done, jnp.int32(stages))
                plgpu.barrier_wait(k_full.at[slot])
                raw_RB = softmax.scores(q_smem, k_smem.at[slot], B)
                plgpu.barrier_arrive(k_empty.at[slot])
                if masked:
                    column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=softmax.WGMMA)
                    raw_RB = jnp.where(column_RB <= last - block * B, raw_RB, -jnp.inf)
                state, weights = softmax.weigh(state, raw_RB, schedule.exponent_scale)
                plgpu.barrier_wait(v_clean if masked else v_full.at[slot])
                state = softmax.accumulate(state, weights, v_smem.at[slot], D, staged)
                plgpu.barrier_arrive(v_empty.at[slot])
                return done + 1, *state

            def one_split(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                done, total = carry[0], State(*carry[1:])
                split, first, end = bounds(number)
                # Only the sequence's last block needs the mask, and only it was zeroed beyond the end.
                full = jnp.minimum(end, blocks - 1)
                part = lax.fori_loop(first, full, lambda b, c: one_block(b, c, masked=False), (done, *nothing))
                done, *part = lax.fori_loop(full, end, lambda b, c: one_block(b, c, masked=True), part)
                if lanes == 1:
                    return done, *softmax.merge(total, State(*part))
                acc, stats = results
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[...] = State(*part).acc_RD
                stats_smem[0] = State(*part).max_R
                stats_smem[1] = State(*part).sum_R
                plgpu.commit_smem()
                rows = pl.ds((token * splits + split) * H + key_head * G, G)
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, G)], acc.at[rows])
                plgpu.copy_smem_to_gmem(stats_smem, stats.at[(token * splits + split) * K + key_head])
                return done, *total

            _, *total = lax.fori_loop(0, mine, one_split, (jnp.int32(0), *nothing))
            if lanes == 1:
                out_smem[...] = softmax.finish(*State(*total)[1:])
                plgpu.commit_smem()
                _take_rows(tiled_RD, pl.ds(first_head, G), single, out_smem.at[pl.ds(0, G)], copied)
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, G)], results[0].at[pl.ds(first_head, G)])
            plgpu.wait_smem_to_gmem(0)

    out: tuple[jax.ShapeDtypeStruct, ...] = (jax.ShapeDtypeStruct((T * H, D), jnp.bfloat16),)
    if lanes > 1:
        acc = jax.ShapeDtypeStruct((T * splits * H, D), jnp.float32)
        out = (acc, jax.ShapeDtypeStruct((T * splits * K, 2, ROWS), jnp.float32))
    layout = swizzled(D)
    staging = (plgpu.SMEM((ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(lanes, K, T),
        grid_names=("lane", "key_head", "token"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="isojax_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=(
            plgpu.SMEM((ROWS, D), jnp.bfloat16),
            plgpu.SMEM((ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((ROWS, D), out[0].dtype),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(),
            *staging,
        ),
    )


def _take_rows(source: jax.Ref | None, rows: pl.Slice, single: jax.Array, into: jax.Ref, copied: jax.Ref) -> None:
    if source is None:
        return

    @pl.when(jnp.logical_not(single))
    def _() -> None:
        plgpu.copy_gmem_to_smem(source.at[rows], into, copied)
        plgpu.barrier_wait(copied)


def combine_splits(
    T: int, H: int, K: int, schedule: Schedule, splits: int, *, tiled: bool = False
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(acc, stats, positions [T], owners [T][, tiled [T*H, D]]) -> out [T*H, D]``.

    Merges the splits of single tokens in ascending order; rows of other tokens are taken from ``tiled`` where it is
    given, and are zero otherwise.
    """
    D, G = schedule.D, H // K

    def kernel(*refs: jax.Ref) -> None:
        acc, stats, positions_T, owners_T, *others = refs
        tiled_RD = others.pop(0) if tiled else None
        out_RD, acc_smem, stats_smem, out_smem, loaded, copied = others
        token, key_head = lax.axis_index("token"), lax.axis_index("key_head")
        single = is_single(owners_T, token, T)
        used = jnp.where(single, lax.div(positions_T[token], jnp.int32(schedule.split)) + 1, 0)

        def one_split(split: jax.Array, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = token * splits + split
            plgpu.copy_gmem_to_smem(acc.at[pl.ds(at * H + key_head * G, G)], acc_smem.at[pl.ds(0, G)], loaded)
            plgpu.copy_gmem_to_smem(stats.at[at * K + key_head], stats_smem, loaded)
            plgpu.barrier_wait(loaded)
            max_R, sum_R = (plgpu.load(stats_smem.at[i], layout=softmax.PER_ROW, optimized=False) for i in range(2))
            part = State(max_R, sum_R, plgpu.load(acc_smem, layout=softmax.WGMMA, optimized=False))
            # The next copy into these buffers must come after these reads.
            plgpu.commit_smem()
            return tuple(softmax.merge(State(*total), part))

        total = lax.fori_loop(0, used, one_split, tuple(softmax.empty_state(D)))
        out_smem[...] = softmax.finish(*State(*total)[1:])
        plgpu.commit_smem()
        rows = pl.ds(token * H + key_head * G, G)
        _take_rows(tiled_RD, rows, single, out_smem.at[pl.ds(0, G)], copied)
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, G)], out_RD.at[rows])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * H, D), jnp.bfloat16),),
        grid=(K, T),
        grid_names=("key_head", "token"),
        kernel_name="isojax_attention_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=(
            plgpu.SMEM((ROWS, D), jnp.float32),
            plgpu.SMEM((2, ROWS), jnp.float32),
            plgpu.SMEM((ROWS, D), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(),
        ),
    )
