"""Attention for many query tokens on sm90: a block takes neighbouring tokens of one head and walks their keys."""

# Dimension letters: T tokens, H query heads, K key heads, D head size, R rows of a warpgroup, B positions of a block.

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_rows import Extent, Rows, Stages
from pallas_kernels.attention.hopper_sequences import LOOKUP, NONE, NOTES, Plan, find_sequences
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule, State
from pallas_kernels.attention.hopper_source import Packed, Paged, load_blocks, zero_rows
from pallas_kernels.hopper_tools import chained_kernel, drain, sm_count, swizzled


def tiled_attention(
    T: int,
    H: int,
    K: int,
    schedule: Schedule,
    source: Packed | Paged,
    *,
    single_tokens: bool = True,
    stages: int = 2,
    staged_weights: bool = False,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(q [T, H*D], k, v, positions [T], owners [T][, block_table]) -> out [T, H*D]``.

    ``owners`` says whose token a row is: with packed keys the segment id, else the request; below zero it is padding,
    which attends to nothing and gives zeros. A sequence's tokens are contiguous in the batch. Without ``single_tokens``
    another kernel takes sequences that have only one token in the batch: their rows are zero here, or not written.

    Up to a head size of 128 a block has two warpgroups of 64 tokens, which take turns: one's softmax runs under the
    other's products. A third loads. The tiles with the most keys, the last ones, start first. A block takes one
    head or two, one after the other; it loads the next one's queries and keys while it computes one.
    """
    D, B = schedule.D, schedule.block
    consumers = 2 if D <= 128 else 1
    tile = ROWS * consumers
    tiles = pl.cdiv(T, tile)
    # Two heads one after the other spare a block's start, where the card is full even so.
    bundle = math.gcd(H, 2) if tiles * H >= 2 * sm_count() else 1
    group = H // K
    paged = isinstance(source, Paged)
    # Columns of the earlier splits' values that wait in registers: where shared memory has no room for all.
    held = D // 2 if D % 128 == 0 else 0
    spans = ((0, held), (held, D)) if held else ((0, D),)

    def blocks_of(last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many blocks a sequence up to position ``last`` has, and how many of them it fills."""
        return lax.div(last, jnp.int32(B)) + 1, lax.div(last + 1, jnp.int32(B))

    def kernel(*refs: jax.Ref) -> None:
        names = iter(refs)
        q_TC, k_C, v_C, positions_T, owners_T = (next(names) for _ in range(5))
        table = next(names) if paged else None
        out_TC, q_smem, k_smem, v_smem, total_smem, out_smem, lookup, notes = (next(names) for _ in range(8))
        looked, q_full, q_empty, k_full, v_full, v_dirty, v_clean, k_empty, v_empty = (next(names) for _ in range(9))
        plan = Plan(notes, next(names), next(names))
        turn = next(names)
        staged_smem = next(names, None)
        warpgroup, first_head = lax.axis_index("warpgroup"), lax.axis_index("head") * bundle
        first_token = (tiles - 1 - lax.axis_index("tile")) * tile

        @pl.when(warpgroup == consumers)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            found = (positions_T, owners_T, lookup, looked, notes)
            sequences = find_sequences(*found, first_token, tile, single_tokens)

            def load_queries(member: jax.Array) -> None:
                for number in range(consumers):

                    @pl.when(member > 0)
                    def _(number: int = number) -> None:
                        plgpu.barrier_wait(q_empty.at[number])

                    tokens, columns = pl.ds(first_token + number * ROWS, ROWS), pl.ds((first_head + member) * D, D)
                    plgpu.copy_gmem_to_smem(q_TC.at[tokens, columns], q_smem.at[number], q_full.at[number])

            def one_head(member: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                published, before = carry
                columns = pl.ds(lax.div(first_head + member, jnp.int32(group)) * D, D)

                def one_sequence(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    number, owner, done = carry
                    last, first_row = sequences.last_position(owner), sequences.first_row(owner)
                    following = sequences.after(owner)
                    plan.publish(number, owner, last, first_row, following)
                    blocks, full_blocks = blocks_of(last)

                    def load_block(block: jax.Array, done: jax.Array, slot: jax.Array, rows: list[jax.Array]) -> None:
                        @pl.when(done >= stages)
                        def _() -> None:
                            plgpu.barrier_wait(k_empty.at[slot])

                        source.load(k_C, rows, columns, k_smem.at[slot], k_full.at[slot])
                        pl.when(done == before)(lambda: load_queries(member))

                        @pl.when(done >= stages)
                        def _() -> None:
                            plgpu.barrier_wait(v_empty.at[slot])

                        @pl.when(block < full_blocks)
                        def _() -> None:
                            source.load(v_C, rows, columns, v_smem.at[slot], v_full.at[slot])

                        @pl.when(block >= full_blocks)
                        def _() -> None:
                            source.load(v_C, rows, columns, v_smem.at[slot], v_dirty)
                            plgpu.barrier_wait(v_dirty)
                            zero_rows(v_smem.at[slot], last + 1 - block * B, B, D)
                            plgpu.barrier_arrive(v_clean.at[slot])

                    sequence = (owner, first_row, jnp.int32(0), blocks, last)
                    done = load_blocks(source, table, *sequence, done, stages, load_block)
                    return number + 1, following, done

                start = (published, sequences.after(-1), before)
                number, _, done = lax.while_loop(lambda carry: carry[1] < NONE, one_sequence, start)
                none = number == published
                pl.when(none)(lambda: plan.publish(number, NONE, sequences.padding()))
                return number + jnp.where(none, 1, 0), done

            _, done = lax.fori_loop(0, bundle, one_head, (jnp.int32(0), jnp.int32(0)))
            plgpu.barrier_wait(plan.taken)
            drain(k_empty, stages, done)
            drain(v_empty, stages, done)

        @pl.when(warpgroup < consumers)
        def _compute() -> None:
            if consumers > 1:
                plgpu.set_max_registers(232, action="increase")
            q_RD, total_RD = q_smem.at[warpgroup], total_smem.at[warpgroup]
            out_RD = out_smem.at[warpgroup]
            staged = staged_smem.at[warpgroup] if staged_weights else None
            first_row = pl.multiple_of(warpgroup * ROWS, ROWS)
            last_row = first_row + ROWS - 1
            rows = pl.ds(first_token + warpgroup * ROWS, ROWS)
            nothing = softmax.empty_state(D)
            # What a tile without sequences leaves, while it is looked up whether it is one.
            out_RD[...] = nothing.acc_RD.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_wait(looked)
            position_R = plgpu.load(lookup.at[0, pl.ds(first_row, ROWS)], layout=softmax.PER_ROW, optimized=False)
            owner_R = plgpu.load(lookup.at[1, pl.ds(first_row, ROWS)], layout=softmax.PER_ROW, optimized=False)
            inside = first_token + last_row < T
            if consumers > 1:
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def take_turn() -> None:
                if consumers > 1:
                    plgpu.barrier_wait(turn.at[warpgroup])

            def give_turn() -> None:
                if consumers > 1:
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])

            own = Rows(
                schedule,
                q_RD,
                Stages(k_smem, k_full, k_empty, stages),
                Stages(v_smem, v_full, v_empty, stages),
                v_clean,
                take_turn,
                give_turn,
                lambda: plgpu.barrier_arrive(q_empty.at[warpgroup]),
                staged,
            )

            def one_sequence(carry: tuple[jax.Array, ...], more: jax.Array) -> tuple[jax.Array, ...]:
                owner, last, misaligned, ends, done, joined, *totals = carry
                blocks, full_blocks = blocks_of(last)
                limit_R = jnp.where(owner_R == owner, position_R, -1)
                # Where all rows are of this sequence, the blocks before the first row's own need no mask.
                alone = inside & (lookup[1, first_row] == owner) & (lookup[1, last_row] == owner)
                unmasked = jnp.where(alone, lax.div(lookup[0, first_row] + 1, jnp.int32(B)), 0)
                extent = Extent(done, blocks, full_blocks, unmasked, limit_R, ends * more)
                splits = own.splits(blocks)

                def one_split(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    raw_RB, *totals = carry

                    def join(part: State, last: bool) -> tuple[jax.Array, ...]:
                        max_R, sum_R, rule = softmax.merge_sums(*totals[:2], part)
                        if not paged:
                            # Such a copy has read other rows. NaN is refused downstream; a wrong number would not be.
                            sum_R = jnp.where((owner_R == owner) & (misaligned > 0), jnp.nan, sum_R)
                        parts = tuple(part.acc_RD[:, first:end] for first, end in spans)

                        def joined_parts() -> tuple[jax.Array, ...]:
                            earlier = (*totals[2:], plgpu.load(total_RD, layout=softmax.WGMMA))
                            return tuple(rule.values(*pair) for pair in zip(earlier, parts, strict=True))

                        # Joined to the empty state, a state stays as it is.
                        values = lax.cond(joined + number == 0, lambda: parts, joined_parts)

                        def keep() -> None:
                            total_RD[...] = values[-1]

                        def finish() -> None:
                            # The head before may still be on its way out.
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                            for (first, end), values_RD in zip(spans, values, strict=True):
                                into = out_RD if not held else out_RD.at[:, pl.ds(first, end - first)]
                                into[...] = softmax.finish(sum_R, values_RD)

                        if last:
                            pl.when(ends > 0)(finish)
                            pl.when(ends == 0)(keep)
                        else:
                            keep()
                        return max_R, sum_R, *values[:-1]

                    raw_RB, totals = own.split(extent, number, raw_RB, join)
                    return raw_RB, *totals

                _, *totals = lax.fori_loop(0, splits, one_split, (own.first_scores(extent), *totals))
                none = (jnp.int32(NONE), jnp.int32(0), jnp.int32(0), jnp.int32(0))
                following = lax.cond(ends > 0, lambda: none, plan.take)
                return *following, done + blocks, joined + splits, *totals

            def one_head(member: jax.Array, done: jax.Array) -> jax.Array:
                columns = pl.ds((first_head + member) * D, D)
                more = jnp.where(member < bundle - 1, 1, 0)
                first_sequence = plan.take()

                def attend() -> jax.Array:
                    plgpu.barrier_wait(q_full.at[warpgroup])
                    empty = (nothing.max_R, nothing.sum_R, *(nothing.acc_RD[:, :held] for _ in spans[1:]))
                    carry = (*first_sequence, done, jnp.int32(0), *empty)
                    carry = lax.while_loop(lambda carry: carry[0] < NONE, lambda c: one_sequence(c, more), carry)
                    return carry[4]

                some, padding = first_sequence[0] < NONE, first_sequence[1]
                done = lax.cond(some, attend, lambda: done)

                # Single tokens' rows are another kernel's, so without padding there may be nothing to write.
                @pl.when(some | (padding > 0))
                def _() -> None:
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_RD, out_TC.at[rows, columns])

                return done

            lax.fori_loop(0, bundle, one_head, jnp.int32(0))
            # The results may still be on their way to memory when the block ends.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if consumers > 1:
                pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    layout = swizzled(D)
    staging = (plgpu.SMEM((consumers, ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, H * D), jnp.bfloat16),),
        grid=(tiles, H // bundle),
        grid_names=("tile", "head"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name="isojax_attention_tiles",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        scratch_types=(
            plgpu.SMEM((consumers, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            # The earlier splits' values wait here while a split runs, unless they are held.
            plgpu.SMEM((consumers, ROWS, D - held), jnp.float32, transforms=swizzled(D - held, "float32")),
            plgpu.SMEM((consumers, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((2, LOOKUP), jnp.int32),
            plgpu.SMEM((NOTES,), jnp.int32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=consumers),
            plgpu.Barrier(num_barriers=2),
            *staging,
        ),
    )
