"""Attention for many query tokens on sm90: a block takes neighbouring tokens of one head and walks their keys."""

# Dimension letters: T tokens, H query heads, K key heads, D head size, R rows of a warpgroup, B positions of a block.

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule, State
from pallas_kernels.attention.hopper_source import ROW_STEP, Packed, Paged, zero_rows
from pallas_kernels.hopper_tools import chained_kernel, drain, swizzled

#: Tokens whose sequence and position a block looks up at once.
LOOKUP = 128
NONE = 2**30
#: Every warp holds all of the looked-up array, so that its reductions need no other warp.
LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((LOOKUP,), (32,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
#: Where in the array of neighbouring owners the loader tells the others which sequence comes next.
PLAN = LOOKUP + 16


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How the two warpgroups of a block share the tensor cores. Changes no bit.

    ``ahead`` says when the next block's scores start: "none" in its own turn, "softmax" before this block's softmax,
    "values" together with this block's values. ``turns`` lets one warpgroup's softmax run under the other's products.
    ``parts`` are how many column parts the values are computed in. ``held`` columns of the earlier splits' values wait
    in registers, the others in shared memory. ``heavy_first`` starts the blocks with the most keys first.
    ``skip_empty`` stores the first split's values without joining them to nothing. ``replicated`` has every warp of the
    loader look all tokens up, which spares it the others' answers. ``early_exit`` ends once the results have left
    shared memory. ``bundle`` heads are taken by one block, one after the other; it divides the number of heads.
    """

    ahead: str = "none"
    turns: bool = False
    parts: int = 1
    held: int = 64
    heavy_first: bool = False
    skip_empty: bool = False
    replicated: bool = False
    early_exit: bool = False
    bundle: int = 1


APART = Overlap()


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
    overlap: Overlap = APART,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the kernel ``(q [T, H*D], k, v, positions [T], owners [T][, block_table]) -> out [T, H*D]``.

    ``owners`` says whose token a row is: with packed keys the segment id, else the request; below zero it is padding,
    which attends to nothing and gives zeros. A sequence's tokens are contiguous in the batch. Without ``single_tokens``
    sequences that have only one token in the batch are left at zero: another kernel takes them.
    """
    D, B = schedule.D, schedule.block
    consumers = 2 if D <= 128 else 1
    tile = ROWS * consumers
    group = H // K
    paged = isinstance(source, Paged)
    split_blocks = schedule.split // B
    # The earlier splits' values wait here while a split runs: these columns in registers, the others in shared memory.
    held = min(D, overlap.held)
    width = D // overlap.parts
    edges = sorted({held, D, *range(0, D, width)})
    spans = list(itertools.pairwise(edges))
    turns = overlap.turns and consumers == 2
    tiles = pl.cdiv(T, tile)

    def kernel(*refs: jax.Ref) -> None:
        names = iter(refs)
        q_TC, k_C, v_C, positions_T, owners_T = (next(names) for _ in range(5))
        table = next(names) if paged else None
        out_TC, q_smem, k_smem, v_smem, lookup, neighbours = (next(names) for _ in range(6))
        total_smem = next(names) if held < D else None
        looked, q_full, k_full, v_full, v_dirty, v_clean, k_empty, v_empty, planned, taken = (
            next(names) for _ in range(10)
        )
        turn = next(names) if turns else None
        staged_smem = next(names, None)
        warpgroup, first_head = lax.axis_index("warpgroup"), lax.axis_index("head") * overlap.bundle
        number = lax.axis_index("tile")
        first_token = (tiles - 1 - number if overlap.heavy_first else number) * tile

        @pl.when(warpgroup == consumers)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            plgpu.copy_gmem_to_smem(positions_T.at[pl.ds(first_token, LOOKUP)], lookup.at[0], looked)
            plgpu.copy_gmem_to_smem(owners_T.at[pl.ds(first_token, LOOKUP)], lookup.at[1], looked)
            plgpu.barrier_wait(looked)
            lane = LANES if overlap.replicated else plgpu.Layout.WG_STRIDED((LOOKUP,), vec_size=1)
            index = plgpu.broadcasted_iota(jnp.int32, (LOOKUP,), 0, layout=lane)
            position, owner = (plgpu.load(lookup.at[row], layout=lane) for row in range(2))
            mine = (owner >= 0) & (index < tile) & (index + first_token < T)
            if not single_tokens:
                neighbours[pl.ds(1, LOOKUP)] = owner
                neighbours[0] = owners_T[jnp.maximum(first_token - 1, 0)]
                neighbours[LOOKUP + 1] = owners_T[jnp.minimum(first_token + LOOKUP, T - 1)]
                # A thread reads here what its neighbours wrote, and nothing else makes it wait for them.
                plgpu.commit_smem()
                before, after = (plgpu.load(neighbours.at[pl.ds(at, LOOKUP)], layout=lane) for at in (0, 2))
                starts = (index + first_token == 0) | (before != owner)
                ends = (index + first_token == T - 1) | (after != owner)
                mine = mine & (jnp.where(starts & ends, 1, 0) == 0)

            def following(previous: jax.Array) -> jax.Array:
                return -jnp.max(jnp.where(mine & (owner > previous), -owner, -NONE))

            def publish(number: jax.Array, current: jax.Array, last: jax.Array, first_row: jax.Array) -> None:
                @pl.when(number > 0)
                def _() -> None:
                    plgpu.barrier_wait(taken)

                neighbours[PLAN] = current
                neighbours[PLAN + 1] = last
                neighbours[PLAN + 2] = lax.rem(first_row, jnp.int32(ROW_STEP))
                plgpu.barrier_arrive(planned)

            def one_head(member: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                columns = pl.ds(lax.div(first_head + member, jnp.int32(group)) * D, D)

                def one_sequence(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    number, current, done = carry
                    here = mine & (owner == current)
                    last = jnp.max(jnp.where(here, position, -1))
                    # With packed keys position 0 is in the batch, as many rows back as the position says.
                    first_row = first_token + jnp.max(jnp.where(here, index - position, -NONE))
                    publish(number, current, last, first_row)
                    blocks = lax.div(last, jnp.int32(B)) + 1

                    def one_block(block: jax.Array, done: jax.Array) -> jax.Array:
                        slot = lax.rem(done, jnp.int32(stages))
                        rows = source.rows(table, current, first_row, block * B, last)

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
                            plgpu.barrier_arrive(v_clean.at[slot])

                        return done + 1

                    return number + 1, following(current), lax.fori_loop(0, blocks, one_block, done)

                number, done = carry
                start = (number, following(jnp.int32(-1)), done)
                number, _, done = lax.while_loop(lambda carry: carry[1] < NONE, one_sequence, start)
                publish(number, jnp.int32(NONE), jnp.int32(0), jnp.int32(0))
                return number + 1, done

            _, done = lax.fori_loop(0, overlap.bundle, one_head, (jnp.int32(0), jnp.int32(0)))
            plgpu.barrier_wait(taken)
            drain(k_empty, stages, done)
            drain(v_empty, stages, done)

        @pl.when(warpgroup < consumers)
        def _compute() -> None:
            if consumers > 1:
                plgpu.set_max_registers(232, action="increase")
            q_RD = q_smem.at[warpgroup]
            waiting = total_smem.at[warpgroup] if total_smem is not None else None
            staged = staged_smem.at[warpgroup] if staged_weights else None
            first_row = pl.multiple_of(warpgroup * ROWS, ROWS)
            last_row = first_row + ROWS - 1
            rows = pl.ds(first_token + warpgroup * ROWS, ROWS)
            plgpu.barrier_wait(looked)
            position_R = plgpu.load(lookup.at[0, pl.ds(first_row, ROWS)], layout=softmax.PER_ROW, optimized=False)
            owner_R = plgpu.load(lookup.at[1, pl.ds(first_row, ROWS)], layout=softmax.PER_ROW, optimized=False)
            inside = first_token + last_row < T
            nothing = softmax.empty_state(width)
            zeros_RD = softmax.empty_state(D).acc_RD
            start = (nothing.max_R, nothing.sum_R, (nothing.acc_RD,) * overlap.parts)
            if turns:
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))

            def take_turn() -> None:
                if turns:
                    plgpu.barrier_wait(turn.at[warpgroup])

            def give_turn() -> None:
                if turns:
                    plgpu.barrier_arrive(turn.at[1 - warpgroup])

            def planned_sequence() -> tuple[jax.Array, ...]:
                plgpu.barrier_wait(planned)
                what = neighbours[PLAN], neighbours[PLAN + 1], neighbours[PLAN + 2]
                plgpu.barrier_arrive(taken)
                return what

            def columns_of(acc: tuple[jax.Array, ...], first: int, end: int) -> jax.Array:
                part, inside = divmod(first, width)
                return acc[part] if end - first == width else acc[part][:, inside : inside + end - first]

            def one_sequence(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                current, last, misaligned, done, joined, *totals = carry
                blocks = lax.div(last, jnp.int32(B)) + 1
                limit_R = jnp.where(owner_R == current, position_R, -1)
                # Where all rows are of this sequence, the blocks before the first row's own need no mask.
                alone = inside & (lookup[1, first_row] == current) & (lookup[1, last_row] == current)
                unmasked = jnp.where(alone, lax.div(lookup[0, first_row] + 1, jnp.int32(B)), 0)

                def mask(raw_RB: jax.Array, block: jax.Array, masked: bool) -> jax.Array:
                    if not masked:
                        return raw_RB
                    column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=softmax.WGMMA)
                    limit_RB = lax.broadcast_in_dim(limit_R - block * B, (ROWS, B), (0,))
                    return jnp.where(column_RB <= limit_RB, raw_RB, -jnp.inf)

                def weigh(
                    part: tuple[jax.Array, ...], raw_RB: jax.Array, block: jax.Array, masked: bool
                ) -> tuple[jax.Array, jax.Array, softmax.Weights]:
                    before = State(part[0], part[1], nothing.acc_RD)
                    state, weights = softmax.weigh(before, mask(raw_RB, block, masked), schedule.exponent_scale)
                    return state.max_R, state.sum_R, weights

                def wait_values(block: jax.Array, slot: jax.Array) -> None:
                    @pl.when(block < blocks - 1)
                    def _() -> None:
                        plgpu.barrier_wait(v_full.at[slot])

                    @pl.when(block == blocks - 1)
                    def _() -> None:
                        plgpu.barrier_wait(v_clean.at[slot])

                def values_of(slot: jax.Array, number: int) -> jax.Ref:
                    whole = v_smem.at[slot]
                    return whole if overlap.parts == 1 else whole.at[:, pl.ds(number * width, width)]

                def add_values(
                    acc: tuple[jax.Array, ...], weights: softmax.Weights, slot: jax.Array, first: int = 0
                ) -> tuple[jax.Array, ...]:
                    added = []
                    for number, acc_RD in enumerate(acc[first:], first):
                        state = State(weights.shrink_R, weights.shrink_R, acc_RD)
                        state = softmax.accumulate(state, weights, values_of(slot, number), width, staged)
                        added.append(state.acc_RD)
                    return tuple(added)

                def one_block(block: jax.Array, part: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
                    slot = lax.rem(done + block, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[slot])

                    def product(acc: jax.Ref) -> jax.Array:
                        plgpu.wgmma(acc, q_RD, k_smem.at[slot].transpose((1, 0)))
                        give_turn()
                        return acc[...]

                    raw_RB = pl.run_scoped(product, plgpu.ACC((ROWS, B), jnp.float32))
                    plgpu.barrier_arrive(k_empty.at[slot])
                    max_R, sum_R, weights = weigh(part, raw_RB, block, masked)
                    wait_values(block, slot)
                    if turns:
                        sum_R, max_R, *weights = lax.optimization_barrier((sum_R, max_R, *weights))
                        weights = softmax.Weights(*weights)
                    take_turn()
                    acc = add_values(part[2], weights, slot)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return max_R, sum_R, acc

                def final_block(
                    block: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array]
                ) -> tuple[tuple[jax.Array, ...], jax.Array]:
                    part, raw_RB = carry
                    slot = lax.rem(done + block, jnp.int32(stages))
                    max_R, sum_R, weights = weigh(part, raw_RB, block, masked=True)
                    wait_values(block, slot)
                    take_turn()
                    acc = add_values(part[2], weights, slot)
                    give_turn()
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return (max_R, sum_R, acc), no_scores

                def scores_under_softmax(
                    block: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array], masked: bool
                ) -> tuple[tuple[jax.Array, ...], jax.Array]:
                    part, raw_RB = carry
                    slot = lax.rem(done + block, jnp.int32(stages))
                    ahead = lax.rem(done + block + 1, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[ahead])

                    def under(next_RB: jax.Ref) -> tuple[tuple[jax.Array, ...], jax.Array]:
                        plgpu.wgmma(next_RB, q_RD, k_smem.at[ahead].transpose((1, 0)))
                        max_R, sum_R, weights = weigh(part, raw_RB, block, masked)
                        plgpu.barrier_wait(v_full.at[slot])
                        acc = add_values(part[2], weights, slot)
                        plgpu.barrier_arrive(v_empty.at[slot])
                        raw = plgpu.wgmma_accumulator_load(next_RB, wait_n=0)
                        plgpu.barrier_arrive(k_empty.at[ahead])
                        return (max_R, sum_R, acc), raw

                    return pl.run_scoped(under, plgpu.ACC((ROWS, B), jnp.float32))

                def scores_beside_values(
                    block: jax.Array, carry: tuple[tuple[jax.Array, ...], jax.Array], masked: bool
                ) -> tuple[tuple[jax.Array, ...], jax.Array]:
                    part, raw_RB = carry
                    slot = lax.rem(done + block, jnp.int32(stages))
                    ahead = lax.rem(done + block + 1, jnp.int32(stages))
                    max_R, sum_R, weights = weigh(part, raw_RB, block, masked)
                    if turns:
                        sum_R, max_R, *weights = lax.optimization_barrier((sum_R, max_R, *weights))
                        weights = softmax.Weights(*weights)
                    plgpu.barrier_wait(v_full.at[slot])
                    plgpu.barrier_wait(k_full.at[ahead])
                    left = weights.weights_RB
                    if staged is not None:
                        staged[...] = left
                        plgpu.commit_smem()
                        left = staged
                    take_turn()

                    def beside(first_RD: jax.Ref, next_RB: jax.Ref) -> tuple[tuple[jax.Array, ...], jax.Array]:
                        plgpu.wgmma(first_RD, left, values_of(slot, 0))
                        plgpu.wgmma(next_RB, q_RD, k_smem.at[ahead].transpose((1, 0)))
                        if overlap.parts == 1:
                            give_turn()
                        # The barrier keeps what uses the values behind the wait.
                        values_RD = lax.optimization_barrier(plgpu.wgmma_accumulator_load(first_RD, wait_n=1))
                        acc = (part[2][0] * weights.shrink_R[:, None] + values_RD,)
                        if overlap.parts == 1:
                            plgpu.barrier_arrive(v_empty.at[slot])
                        for number in range(1, overlap.parts):

                            def rest(acc: jax.Ref, number: int = number) -> jax.Array:
                                plgpu.wgmma(acc, left, values_of(slot, number))
                                if number == overlap.parts - 1:
                                    give_turn()
                                return acc[...]

                            values_RD = pl.run_scoped(rest, plgpu.ACC((ROWS, width), jnp.float32))
                            acc += (part[2][number] * weights.shrink_R[:, None] + values_RD,)
                        raw = plgpu.wgmma_accumulator_load(next_RB, wait_n=0)
                        plgpu.barrier_arrive(k_empty.at[ahead])
                        if overlap.parts > 1:
                            plgpu.barrier_arrive(v_empty.at[slot])
                        return (max_R, sum_R, acc), raw

                    accumulators = (plgpu.ACC((ROWS, width), jnp.float32), plgpu.ACC((ROWS, B), jnp.float32))
                    return pl.run_scoped(beside, *accumulators)

                no_scores = plgpu.layout_cast(jnp.zeros((ROWS, B), jnp.float32), softmax.WGMMA)
                block_of = {"softmax": scores_under_softmax, "values": scores_beside_values}.get(overlap.ahead)

                def part_of(
                    first: jax.Array, end: jax.Array, raw: jax.Array | None
                ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
                    if block_of is None:
                        middle = jnp.minimum(jnp.maximum(first, unmasked), end)
                        part = lax.fori_loop(first, middle, lambda b, s: one_block(b, s, masked=False), start)
                        return lax.fori_loop(middle, end, lambda b, s: one_block(b, s, masked=True), part), None
                    followed = jnp.minimum(end, blocks - 1)
                    middle = jnp.minimum(jnp.maximum(first, unmasked), followed)
                    carry = (start, raw)
                    carry = lax.fori_loop(first, middle, lambda b, s: block_of(b, s, masked=False), carry)
                    carry = lax.fori_loop(middle, followed, lambda b, s: block_of(b, s, masked=True), carry)
                    return lax.fori_loop(followed, end, final_block, carry)

                def one_split(number: jax.Array, carry: tuple[object, ...]) -> tuple[object, ...]:
                    totals, raw = carry
                    first = number * split_blocks
                    end = jnp.minimum(first + split_blocks, blocks)
                    (part_max_R, part_sum_R, acc), raw = part_of(first, end, raw)
                    part = State(part_max_R, part_sum_R, acc[0])
                    max_R, sum_R, rule = softmax.merge_sums(totals[0], totals[1], part)
                    kept = []

                    def join_waiting(merged: bool) -> None:
                        for low, high in spans:
                            if high <= held:
                                continue
                            place = waiting if high - low == D - held else waiting.at[:, pl.ds(low - held, high - low)]
                            new = columns_of(acc, low, high)
                            if merged:
                                new = rule.values(plgpu.load(place, layout=softmax.WGMMA), new)
                            place[...] = new

                    if overlap.skip_empty:
                        # Joined to the empty state, a state stays as it is.
                        fresh = joined + number == 0
                        pl.when(fresh)(lambda: join_waiting(False))
                        pl.when(jnp.logical_not(fresh))(lambda: join_waiting(True))
                    else:
                        join_waiting(True)
                    for index, (low, high) in enumerate(span for span in spans if span[1] <= held):
                        kept.append(rule.values(totals[2][index], columns_of(acc, low, high)))
                    return (max_R, sum_R, tuple(kept)), raw

                raw = None
                if block_of is not None:
                    slot = lax.rem(done, jnp.int32(stages))
                    plgpu.barrier_wait(k_full.at[slot])
                    raw = softmax.scores(q_RD, k_smem.at[slot], B)
                    plgpu.barrier_arrive(k_empty.at[slot])
                splits = lax.div(blocks - 1, jnp.int32(split_blocks)) + 1
                (max_R, sum_R, held_RD), _ = lax.fori_loop(0, splits, one_split, (tuple(totals), raw))
                if not paged:
                    # Such a copy would have read other rows. NaN is refused downstream; a wrong number would not be.
                    sum_R = jnp.where((owner_R == current) & (misaligned > 0), jnp.nan, sum_R)
                return *planned_sequence(), done + blocks, joined + splits, max_R, sum_R, held_RD

            def one_head(member: jax.Array, done: jax.Array) -> jax.Array:
                columns = pl.ds((first_head + member) * D, D)
                plgpu.copy_gmem_to_smem(q_TC.at[rows, columns], q_RD, q_full.at[warpgroup])
                if waiting is not None:
                    waiting[...] = zeros_RD[:, held:]
                kept = tuple(zeros_RD[:, low:high] for low, high in spans if high <= held)
                carry = (*planned_sequence(), done, jnp.int32(0), nothing.max_R, nothing.sum_R, kept)
                plgpu.barrier_wait(q_full.at[warpgroup])
                if overlap.ahead == "none":
                    take_turn()
                carry = lax.while_loop(lambda carry: carry[0] < NONE, one_sequence, carry)
                if overlap.ahead == "none":
                    give_turn()
                done, _, _, sum_R, kept = carry[3:]
                for columns_RD, (low, high) in zip(kept, spans, strict=False):
                    q_RD[:, low:high] = softmax.finish(sum_R, columns_RD)
                if waiting is not None:
                    q_RD[:, held:] = softmax.finish(sum_R, plgpu.load(waiting, layout=softmax.WGMMA))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(q_RD, out_TC.at[rows, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=overlap.early_exit)
                return done

            lax.fori_loop(0, overlap.bundle, one_head, jnp.int32(0))
            if turns:
                pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

    layout = swizzled(D)
    waiting_columns: tuple[object, ...] = ()
    if held < D:
        columns = swizzled(D - held, "float32")
        waiting_columns = (plgpu.SMEM((consumers, ROWS, D - held), jnp.float32, transforms=columns),)
    staging = (plgpu.SMEM((consumers, ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, H * D), jnp.bfloat16),),
        grid=(tiles, H // overlap.bundle) if overlap.heavy_first else (H // overlap.bundle, tiles),
        grid_names=("tile", "head") if overlap.heavy_first else ("head", "tile"),
        num_threads=consumers + 1,
        thread_name="warpgroup",
        kernel_name="isojax_attention_tiles",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0 if overlap.replicated else 256
        ),
        scratch_types=(
            plgpu.SMEM((consumers, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((2, LOOKUP), jnp.int32),
            plgpu.SMEM((2 * LOOKUP,), jnp.int32),
            *waiting_columns,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=consumers),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=source.arrivals),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=consumers),
            *((plgpu.Barrier(num_barriers=2),) if turns else ()),
            *staging,
        ),
    )
