"""Attention for single query tokens over paged keys on sm90: blocks that stay take one split of one key head each."""

# Dimension letters: T tokens, H query heads, K key heads, G query heads of a key head, D head size, E head size padded
# to whole warpgroups, R rows of a warpgroup (the first G are query heads, the others idle), B positions of a block.
#
# A part is one split of one single token, or the whole token; an item is one key head of a part. Parts are numbered
# in the order of tokens and splits, items likewise, and item i belongs to block i modulo the grid: the work is spread
# evenly whatever the contexts' lengths are.

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_parts import Parts
from pallas_kernels.attention.hopper_singles import Singles
from pallas_kernels.attention.hopper_singles import scratch as singles_scratch
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule, State
from pallas_kernels.attention.hopper_source import Paged, load_blocks, zero_rows
from pallas_kernels.hopper_tools import drain, early_kernel, swizzled

#: The numbers that describe an item to the warpgroup that computes it, with room to a multiple of 16 bytes. The first
#: is the row of ``out`` where the token has no other part, else the item's own number.
PLAN = 4


def decode_attention(
    parts: Parts,
    schedule: Schedule,
    source: Paged,
    *,
    blocks: int,
    first: bool = False,
    stages: int = 2,
    staged_weights: bool = False,
) -> Callable[..., tuple[jax.Array, ...]]:
    """``(q [T*H, D], k, v, positions [T], owners [T], block_table[, out [T*H, D]]) -> (out[, acc, stats, merges])``.

    The kernel takes the tokens that are the only ones of their requests in the batch. Those of one part it finishes in
    place in ``out``; other rows it leaves alone. Unless parts are whole tokens, its further results are the states of
    the others' parts, in the shapes that ``parts`` names, which `combine_parts` merges. ``blocks`` is the size of the
    grid and moves no bit. The launch before must have none of these operands for its result but ``out``.

    Where it is the ``first`` kernel of its program nothing wrote ``out`` before: rows of padding become zero, and rows
    of a request with several tokens, which another program is for, NaN. Of its operands only positions and owners must
    not be results of the launch before.
    """
    T, H, K, G = parts.T, parts.H, parts.K, parts.G
    D, B = schedule.D, schedule.block
    if G > ROWS:
        raise ValueError(f"{G} query heads share a key head; at most {ROWS} fit a warpgroup")
    split_blocks = schedule.split // B
    # Items whose queries and plans wait for the computing warpgroup.
    ahead = 2
    if D > 128:
        # Larger heads leave no room for a second stage.
        stages = ahead = 1
    # TMA fills what is beyond the last row with zeros; a tile of shared memory has 8 rows.
    query_rows = 8 if G <= 8 else ROWS

    def kernel(wait: Callable[[], None], *refs: jax.Ref) -> None:
        names = iter(refs)
        q_RD, k_C, v_C, positions_T, owners_T, table = (next(names) for _ in range(6))
        if not first:
            # The result as an operand: it is the same memory.
            next(names)
        out_RD = next(names)
        acc, stats, merges = (None if parts.whole else next(names) for _ in range(3))
        q_plain, q_smem, k_smem, v_smem, results = (next(names) for _ in range(5))
        out_smem, (acc_smem, stats_smem) = (results, (None, None)) if parts.whole else results
        found = [next(names) for _ in range(4)]
        plan, q_full, k_full, v_full, k_empty, v_empty, planned, taken = (next(names) for _ in range(8))
        staged = next(names, None)
        warpgroup, grid_block = lax.axis_index("warpgroup"), lax.axis_index("block")

        @pl.when(warpgroup == 1)
        def _load() -> None:
            singles = Singles(parts, schedule.split, positions_T, owners_T, *found)
            # Nothing but positions and owners is read before this, and nothing written: what the launch before computes
            # may be our queries and keys, and what it reads may be the memory that we were given for our results.
            early_lookup = first and singles.chunks == 1
            if first and not early_lookup:
                wait()
            singles.prepare()

            def publish(made: jax.Array, *what: jax.Array) -> jax.Array:
                slot = lax.rem(made, jnp.int32(ahead))

                @pl.when(made >= ahead)
                def _() -> None:
                    plgpu.barrier_wait(taken.at[slot])

                for place, value in enumerate(what):
                    plan[slot * PLAN + place] = value
                plgpu.barrier_arrive(planned.at[slot])
                return slot

            def load_block(
                block: jax.Array, done: jax.Array, slot: jax.Array, rows: list[jax.Array], key_head: jax.Array
            ) -> None:
                for cache, into, full, empty in ((k_C, k_smem, k_full, k_empty), (v_C, v_smem, v_full, v_empty)):

                    @pl.when(done >= stages)
                    def _(slot: jax.Array = slot, empty: jax.Ref = empty) -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    source.load(cache, rows, pl.ds(key_head * D, D), into.at[slot], full.at[slot])

            def chunk_items(
                chunk: jax.Array,
                count: jax.Array,
                number: jax.Array,
                before: jax.Array,
                several: jax.Array,
                *rest: jax.Array,
            ) -> tuple[jax.Array, ...]:
                tokens = singles.number(chunk, count)
                if early_lookup:
                    wait()

                def one_item(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    number, made, done = carry
                    part = lax.div(number, jnp.int32(K))
                    key_head = number - part * K
                    at = tokens.holds(part - before)
                    token, (last, owner) = tokens.first_token + at, singles.token(chunk, at)
                    first_block, end_block = jnp.int32(0), lax.div(last, jnp.int32(B)) + 1
                    goes_to = row = token * H + key_head * G
                    if not parts.whole:
                        earlier, rank = singles.before(at)
                        splits = lax.div(end_block - 1, jnp.int32(split_blocks)) + 1
                        goes_to = jnp.where(splits > 1, number, row)
                        first_block = (part - before - earlier) * split_blocks
                        end_block = jnp.minimum(first_block + split_blocks, end_block)

                        @pl.when((splits > 1) & (first_block == 0) & (key_head == 0))
                        def _() -> None:
                            for place, value in enumerate((token, part, splits)):
                                merges[several + rank + 1, place] = value

                    slot = publish(made, goes_to, first_block, end_block, last)
                    q_rows = q_RD.at[pl.ds(row, query_rows)]
                    plgpu.copy_gmem_to_smem(q_rows, q_plain.at[slot, pl.ds(0, query_rows)], q_full.at[slot])
                    blocks_of_part = (owner, jnp.int32(0), first_block, end_block, last)
                    load = functools.partial(load_block, key_head=key_head)
                    done = load_blocks(source, table, *blocks_of_part, done, stages, load)
                    return number + blocks, made + 1, done

                before_end = (before + tokens.parts) * K
                carry = lax.while_loop(lambda carry: carry[0] < before_end, one_item, (number, *rest))
                return carry[0], before + tokens.parts, several + tokens.several, *carry[1:]

            def one_chunk(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                prior, after, *counters = carry
                # What the earlier chunk's loop read has to be read before the next one comes over it.
                plgpu.commit_smem()
                singles.start(chunk + 1)
                # Read long before it is needed.
                next_after = singles.next_owner(chunk + 1)
                count = singles.counts(chunk, prior, after)
                work = functools.partial(chunk_items, chunk, count, *counters)
                if singles.chunks == 1:
                    counters = work()
                else:
                    # A step of long prompts has none of these tokens in most chunks.
                    counters = lax.cond(jnp.max(count) > 0, work, lambda: tuple(counters))
                return singles.last_owner(chunk), next_after, *counters

            zero = jnp.int32(0)
            carry = (zero, singles.next_owner(zero), grid_block, zero, zero, zero, zero)
            *_, several, made, done = lax.fori_loop(0, singles.chunks, one_chunk, carry)
            if not parts.whole:

                @pl.when(grid_block == 0)
                def _() -> None:
                    merges[0, 0] = several

            publish(made, jnp.int32(-1), zero, zero, zero)
            drain(taken, ahead, made + 1)
            drain(k_empty, stages, done)
            drain(v_empty, stages, done)

        @pl.when(warpgroup == 0)
        def _compute() -> None:
            # The tiles' launch only writes `out`, so behind it tokens are looked up and keys loaded meanwhile.
            wait()
            nothing, start = softmax.empty_state(D), softmax.start_state(D, G)

            def fill_other(row: jax.Array) -> None:
                before, own, after = (owners_T[jnp.clip(row + step, 0, T - 1)] for step in (-1, 0, 1))
                several = ((row > 0) & (before == own)) | ((row < T - 1) & (after == own))

                @pl.when((row < T) & ((own < 0) | several))
                def _() -> None:
                    value = jnp.where(own < 0, jnp.float32(0), jnp.float32(jnp.nan))
                    # The row before may still be on its way out.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    filled = plgpu.layout_cast(jnp.full((ROWS, D), value, jnp.float32), softmax.WGMMA)
                    out_smem[...] = filled.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    for head in range(0, H, ROWS):
                        heads = min(ROWS, H - head)
                        into = out_RD.at[pl.ds(row * H + head, heads)]
                        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, heads)], into)

            if first:
                lax.fori_loop(0, pl.cdiv(T, blocks), lambda turn, _: fill_other(turn * blocks + grid_block), None)

            def planned_item(made: jax.Array) -> tuple[jax.Array, ...]:
                slot = lax.rem(made, jnp.int32(ahead))
                plgpu.barrier_wait(planned.at[slot])
                return slot, *(plan[slot * PLAN + place] for place in range(4))

            def one_block(
                block: jax.Array, carry: tuple[jax.Array, ...], last: jax.Array, masked: bool
            ) -> tuple[jax.Array, ...]:
                done, state = carry[0], State(*carry[1:])
                slot = lax.rem(done, jnp.int32(stages))
                plgpu.barrier_wait(k_full.at[slot])
                raw_RB = softmax.scores(q_smem, k_smem.at[slot], B)
                plgpu.barrier_arrive(k_empty.at[slot])
                if masked:
                    column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=softmax.WGMMA)
                    raw_RB = jnp.where(column_RB <= last - block * B, raw_RB, -jnp.inf)
                state, weights = softmax.weigh(state, raw_RB, schedule.exponent_scale)
                plgpu.barrier_wait(v_full.at[slot])
                if masked:
                    zero_rows(v_smem.at[slot], last + 1 - block * B, B, D)
                state = softmax.accumulate(state, weights, v_smem.at[slot], D, staged)
                plgpu.barrier_arrive(v_empty.at[slot])
                return done + 1, *state

            def one_split(
                first: jax.Array, end: jax.Array, last: jax.Array, done: jax.Array
            ) -> tuple[jax.Array, State]:
                # Only a last block that the sequence does not fill needs the mask, and zeros beyond the end.
                full = jnp.minimum(end, lax.div(last + 1, jnp.int32(B)))
                carry = (done, *start)
                carry = lax.fori_loop(first, full, lambda b, c: one_block(b, c, last, masked=False), carry)
                done, *part = lax.fori_loop(full, end, lambda b, c: one_block(b, c, last, masked=True), carry)
                return done, State(*part)

            def all_splits(end: jax.Array, last: jax.Array, done: jax.Array) -> tuple[jax.Array, State]:
                def add(split: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    first = split * split_blocks
                    done, part = one_split(first, jnp.minimum(first + split_blocks, end), last, carry[0])
                    return done, *softmax.merge(State(*carry[1:]), part)

                splits = lax.div(end - 1, jnp.int32(split_blocks)) + 1
                done, *total = lax.fori_loop(0, splits, add, (done, *nothing))
                return done, State(*total)

            def finish(state: State, row: jax.Array) -> None:
                out_smem[...] = softmax.finish(state.sum_R, state.acc_RD)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, G)], out_RD.at[pl.ds(row, G)])

            def keep(state: State, item: jax.Array) -> None:
                acc_smem[...] = state.acc_RD
                stats_smem[0] = state.max_R
                stats_smem[1] = state.sum_R
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(acc_smem.at[pl.ds(0, G)], acc.at[pl.ds(item * G, G), pl.ds(0, D)])
                plgpu.copy_smem_to_gmem(stats_smem, stats.at[item])

            def one_item(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot, goes_to, first, end, last, made, done = carry
                plgpu.barrier_wait(q_full.at[slot])
                # A copy into wgmma's swizzled layout would have to start at a multiple of 8 heads.
                heads_RD = plgpu.load(q_plain.at[slot], layout=softmax.WGMMA, optimized=False)
                q_smem[...] = softmax.without_idle(heads_RD, G)
                plgpu.commit_smem()
                plgpu.barrier_arrive(taken.at[slot])
                done, state = all_splits(end, last, done) if parts.whole else one_split(first, end, last, done)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if parts.whole:
                    finish(state, goes_to)
                else:
                    # Joined to the empty state, the state of an only part stays as it is.
                    only = (first == 0) & (end * B > last)
                    pl.when(only)(lambda: finish(state, goes_to))
                    pl.when(jnp.logical_not(only))(lambda: keep(state, goes_to))
                return *planned_item(made + 1), made + 1, done

            zero = jnp.int32(0)
            carry = (*planned_item(zero), zero, zero)
            slot, *_ = lax.while_loop(lambda carry: carry[1] >= 0, one_item, carry)
            plgpu.barrier_arrive(taken.at[slot])
            plgpu.wait_smem_to_gmem(0)

    layout = swizzled(D)
    staging = (plgpu.SMEM((ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    states = (
        jax.ShapeDtypeStruct(parts.acc, jnp.float32),
        jax.ShapeDtypeStruct(parts.stats, jnp.float32),
        jax.ShapeDtypeStruct(parts.merges, jnp.int32),
    )
    # An item has either of them, so they share their memory.
    finished = plgpu.SMEM((ROWS, D), jnp.bfloat16)
    state = (plgpu.SMEM((ROWS, D), jnp.float32), plgpu.SMEM((2, ROWS), jnp.float32))
    return early_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * H, D), jnp.bfloat16), *(() if parts.whole else states)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="isojax_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=256),
        scratch_types=(
            plgpu.SMEM((ahead, ROWS, D), jnp.bfloat16),
            plgpu.SMEM((ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            finished if parts.whole else plgpu.RefUnion(finished, state),
            *singles_scratch(parts.L),
            plgpu.SMEM((ahead * PLAN,), jnp.int32),
            plgpu.Barrier(num_barriers=ahead),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=ahead),
            plgpu.Barrier(num_barriers=ahead),
            *staging,
        ),
    )
