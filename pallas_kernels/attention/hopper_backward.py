"""The packed attention's backward on sm90: one kernel for queries, one for keys and values, no sum across blocks."""

# Dimension letters: T tokens, H query heads, K key heads, D head size, R rows of a warpgroup (64), B rows of the block
# that a warpgroup meets in one step.
#
# Both kernels cut the packed rows at absolute multiples of a tile, whatever sequences lie there: a row's sequence is
# the rows from its start on, so a query sees the keys from its own start up to itself. Each result is summed by one
# warpgroup in one order, which makes the gradients the same in every run.
# Source: Dao 2023, FlashAttention-2, algorithm 2, split in two kernels; the first normalises its weights at the end, so
# that one pass over the keys gives the queries' gradient and the log-sum-exp that the second needs.

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_softmax import PER_ROW, ROWS, WGMMA
from pallas_kernels.hopper_tools import drain, fitting_stages, swizzled

CONSUMERS = 2
TILE = CONSUMERS * ROWS
#: Rows that a warpgroup meets in a step. One of keys keeps two sums in registers, so its steps are smaller.
KEY_BLOCK, QUERY_BLOCK = 128, 64
PER_COLUMN = WGMMA.reduce(0)
_PARAMETERS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)


def hopper_gradients(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    positions_T: jax.Array,
    segment_ids_T: jax.Array,
    out_THD: jax.Array,
    cotangent_THD: jax.Array,
    *,
    scale: float,
    key_block: int = KEY_BLOCK,
    query_block: int = QUERY_BLOCK,
    staged_weights: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of q, k and v, bfloat16, of `pallas_kernels.attention`'s operands, result and cotangent.

    key_block, query_block: keys that a warpgroup of queries meets in a step, and queries that one of keys meets; they
    divide 128. staged_weights: wgmma's left operands go through shared memory, which is all that the GPU
    interpreter knows.
    Raises NotImplementedError for operands that are not bfloat16, head sizes beyond 128, or T not a multiple of 128.
    """
    T, H, D = q_THD.shape
    K = k_TKD.shape[1]
    if q_THD.dtype != jnp.bfloat16 or D % 16 or D > 128 or T % TILE:
        raise NotImplementedError(
            f"attention's backward on sm90 takes bfloat16, head sizes in steps of 16 up to 128 and tokens in steps of "
            f"{TILE}; got {q_THD.dtype}, {D} and {T}"
        )
    mean_HT = jnp.sum(cotangent_THD.astype(jnp.float32) * out_THD.astype(jnp.float32), axis=-1).T
    start_T = jnp.arange(T, dtype=jnp.int32) - positions_T
    tiles = jnp.arange(T // TILE, dtype=jnp.int32) * TILE
    # Starts never fall from row to row, so a tile's first row decides which keys it begins with, and the queries of a
    # tile of keys end before the first block whose first row starts behind the tile.
    first_block = start_T[::TILE] // key_block
    end_block = jnp.sum(start_T[None, ::query_block] < (tiles + TILE)[:, None], axis=1, dtype=jnp.int32)
    # Padding rows give a constant zero: they see no key.
    start_T = jnp.where(segment_ids_T < 0, T, start_T)
    q_TC, g_TC = (a.reshape(T, H * D) for a in (q_THD, cotangent_THD))
    k_TC, v_TC = (a.reshape(T, K * D) for a in (k_TKD, v_TKD))
    queries = query_kernel(T, H, K, D, key_block, scale=scale, staged_weights=staged_weights)
    keys = key_kernel(T, H, K, D, query_block, scale=scale, staged_weights=staged_weights)
    g_q, log_sum_HT = queries(q_TC, k_TC, v_TC, g_TC, mean_HT, start_T, first_block)
    g_k, g_v = keys(q_TC, k_TC, v_TC, g_TC, mean_HT, log_sum_HT, start_T, end_block)
    return g_q.reshape(T, H, D), g_k.reshape(T, K, D), g_v.reshape(T, K, D)


def _zeros(*shape: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def _two_products(a: tuple[jax.Ref, jax.Ref], b: tuple[jax.Ref, jax.Ref], columns: int) -> tuple[jax.Array, jax.Array]:
    """a[0] @ b[0].T and a[1] @ b[1].T, fp32 [ROWS, columns]; waits for the tensor cores once."""

    def products(first: jax.Ref, second: jax.Ref) -> tuple[jax.Array, jax.Array]:
        plgpu.wgmma(first, a[0], b[0].transpose((1, 0)))
        plgpu.wgmma(second, a[1], b[1].transpose((1, 0)))
        return first[...], second[...]

    kind = plgpu.ACC((ROWS, columns), jnp.float32)
    return pl.run_scoped(products, kind, kind)


class _Adder:
    """Adds products to sums in registers, left operands from registers too, or, to be interpreted, as it can be.

    The GPU interpreter knows wgmma with a left operand in shared memory (``staged``) and a sum that starts at zero.
    """

    def __init__(self, staged: tuple[jax.Ref, ...] | None) -> None:
        self.staged = staged

    def __call__(self, *sums: tuple[jax.Array, jax.Array, jax.Ref]) -> tuple[jax.Array, ...]:
        """total + left @ right for each (total, left, right); waits for the tensor cores once."""
        totals, lefts, rights = zip(*sums, strict=True)
        lefts = tuple(left.astype(jnp.bfloat16) for left in lefts)
        if self.staged is None:

            def products(accumulators: tuple[jax.Ref, ...]) -> None:
                for accumulator, left, right in zip(accumulators, lefts, rights, strict=True):
                    plgpu.wgmma(accumulator, left, right)

            return tuple(pl.run_state(products)(tuple(plgpu.ACC.init(total) for total in totals)))
        return tuple(
            total + self._from_zero(left, right, place)
            for total, left, right, place in zip(totals, lefts, rights, self.staged, strict=True)
        )

    def _from_zero(self, left: jax.Array, right: jax.Ref, place: jax.Ref) -> jax.Array:
        place[...] = left
        plgpu.commit_smem()

        def product(accumulator: jax.Ref) -> jax.Array:
            plgpu.wgmma(accumulator, place, right)
            return accumulator[...]

        return pl.run_scoped(product, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))


def query_kernel(
    T: int, H: int, K: int, D: int, B: int, *, scale: float, staged_weights: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel ``(q, k, v, g, mean [H, T], start [T], first_block) -> (g_q [T, H*D], log_sum [H, T])``.

    ``mean`` is every row's product of result and cotangent, ``first_block`` by tile the first block of keys. The
    log-sum-exp is of scores scaled for powers of two. A block has two warpgroups of 64 queries; a third loads.
    """
    group, exponent_scale = H // K, scale * math.log2(math.e)
    # Of one stage: keys and values; beside it queries, cotangents and what a row needs.
    stages = fitting_stages(4, T // B, 2 * B * D * 2, 2 * TILE * D * 2 + 3 * 1024)

    def kernel(*refs: jax.Ref) -> None:
        q_TC, k_TC, v_TC, g_TC, mean_HT, start_T, first_block, g_q_TC, log_sum_HT = refs[:9]
        q_smem, g_smem, k_smem, v_smem, mean_smem, start_smem, rows_full, k_full, v_full, k_empty, v_empty = refs[9:20]
        staged_smem = refs[20] if staged_weights else None
        warpgroup, head = lax.axis_index("warpgroup"), lax.axis_index("head")
        # The last tiles of a long sequence have the most keys and start first.
        tile = T // TILE - 1 - lax.axis_index("tile")
        first, end = first_block[tile], lax.div(tile * TILE + TILE - 1, jnp.int32(B)) + 1

        @pl.when(warpgroup == CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            columns = pl.ds(lax.div(head, jnp.int32(group)) * D, D)

            def one_block(step: jax.Array, _: None) -> None:
                slot = lax.rem(step, jnp.int32(stages))
                rows = pl.ds(pl.multiple_of((first + step) * B, B), B)
                for source, into, full, empty in ((k_TC, k_smem, k_full, k_empty), (v_TC, v_smem, v_full, v_empty)):
                    pl.when(step >= stages)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                    plgpu.copy_gmem_to_smem(source.at[rows, columns], into.at[slot], full.at[slot])

            lax.fori_loop(0, end - first, one_block, None)
            drain(k_empty, stages, end - first)
            drain(v_empty, stages, end - first)

        @pl.when(warpgroup < CONSUMERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            q_RD, g_RD, full = q_smem.at[warpgroup], g_smem.at[warpgroup], rows_full.at[warpgroup]
            mean_own, start_own = mean_smem.at[warpgroup], start_smem.at[warpgroup]
            add = _Adder((staged_smem.at[warpgroup],) if staged_weights else None)
            first_row = pl.multiple_of(tile * TILE + warpgroup * ROWS, ROWS)
            rows, columns = pl.ds(first_row, ROWS), pl.ds(head * D, D)
            plgpu.copy_gmem_to_smem(q_TC.at[rows, columns], q_RD, full)
            plgpu.copy_gmem_to_smem(g_TC.at[rows, columns], g_RD, full)
            plgpu.copy_gmem_to_smem(mean_HT.at[head, rows], mean_own, full)
            plgpu.copy_gmem_to_smem(start_T.at[rows], start_own, full)
            plgpu.barrier_wait(full)
            mean_R = plgpu.load(mean_own, layout=PER_ROW, optimized=False)
            start_R = plgpu.load(start_own, layout=PER_ROW, optimized=False)

            def one_block(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                max_R, sum_R, acc_RD = state
                slot = lax.rem(step, jnp.int32(stages))
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[slot])
                raw_RB, g_weight_RB = _two_products((q_RD, g_RD), (k_smem.at[slot], v_smem.at[slot]), B)
                plgpu.barrier_arrive(v_empty.at[slot])
                key_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=WGMMA) + (first + step) * B
                row_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 0, layout=WGMMA) + first_row
                visible_RB = (key_RB <= row_RB) & (key_RB >= lax.broadcast_in_dim(start_R, (ROWS, B), (0,)))
                raw_RB = jnp.where(visible_RB, raw_RB, -jnp.inf)
                max_new_R = jnp.maximum(max_R, jnp.max(raw_RB, axis=1) * exponent_scale)
                # Before its start a row has seen no key, and -inf - -inf would be NaN.
                finite_R = jnp.where(max_new_R == -jnp.inf, 0.0, max_new_R)
                weight_RB = jnp.exp2(raw_RB * exponent_scale - finite_R[:, None])
                shrink_R = jnp.exp2(max_R - finite_R)
                sum_R = sum_R * shrink_R + jnp.sum(weight_RB, axis=1)
                g_score_RB = weight_RB * (g_weight_RB - mean_R[:, None])
                (acc_RD,) = add((acc_RD * shrink_R[:, None], g_score_RB, k_smem.at[slot]))
                plgpu.barrier_arrive(k_empty.at[slot])
                return max_new_R, sum_R, acc_RD

            nothing = jnp.full((ROWS,), -jnp.inf, jnp.float32), jnp.zeros((ROWS,), jnp.float32)
            state = (*(plgpu.layout_cast(value, PER_ROW) for value in nothing), _zeros(ROWS, D))
            max_R, sum_R, acc_RD = lax.fori_loop(0, end - first, one_block, state)
            some_R = sum_R > 0.0
            factor_R = jnp.where(some_R, scale / jnp.where(some_R, sum_R, 1.0), 0.0)
            q_RD[...] = (acc_RD * factor_R[:, None]).astype(jnp.bfloat16)
            mean_own[...] = max_R + jnp.log(sum_R) * math.log2(math.e)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_RD, g_q_TC.at[rows, columns])
            plgpu.copy_smem_to_gmem(mean_own, log_sum_HT.at[head, rows])
            # The results may still be on their way to memory when the block ends.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    layout = swizzled(D)
    staging = (plgpu.SMEM((CONSUMERS, ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, H * D), jnp.bfloat16), jax.ShapeDtypeStruct((H, T), jnp.float32)),
        grid=(T // TILE, H),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="isojax_attention_query_gradients",
        compiler_params=_PARAMETERS,
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((CONSUMERS, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            plgpu.SMEM((CONSUMERS, ROWS), jnp.int32),
            plgpu.Barrier(num_arrivals=4, num_barriers=CONSUMERS),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            *staging,
        ),
    )


def key_kernel(
    T: int, H: int, K: int, D: int, B: int, *, scale: float, staged_weights: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel ``(q, k, v, g, mean, log_sum, start, end_block) -> (g_k [T, K*D], g_v [T, K*D])``.

    ``end_block`` says by tile of keys behind which block no query sees them. A block has two warpgroups of 64 keys of
    one head, which meet the queries of all heads that share it; a third loads.
    """
    group, exponent_scale = H // K, scale * math.log2(math.e)
    # Of one stage: queries, cotangents and what a query needs; beside it keys and values.
    stages = fitting_stages(4, T // B, 2 * B * D * 2 + 3 * 1024, 2 * TILE * D * 2)

    def kernel(*refs: jax.Ref) -> None:
        q_TC, k_TC, v_TC, g_TC, mean_HT, log_sum_HT, start_T, end_block, g_k_TC, g_v_TC = refs[:10]
        k_smem, v_smem, q_smem, g_smem, mean_smem, log_sum_smem, start_smem, keys_full, full, empty = refs[10:20]
        staged_smem = refs[20] if staged_weights else None
        warpgroup, key_head, tile = lax.axis_index("warpgroup"), lax.axis_index("head"), lax.axis_index("tile")
        first = lax.div(tile * TILE, jnp.int32(B))
        blocks = end_block[tile] - first

        @pl.when(warpgroup == CONSUMERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def one_block(step: jax.Array, _: None) -> None:
                slot, arrived = lax.rem(step, jnp.int32(stages)), full.at[lax.rem(step, jnp.int32(stages))]
                member = lax.div(step, blocks)
                head = key_head * group + member
                rows = pl.ds(pl.multiple_of((first + step - member * blocks) * B, B), B)
                columns = pl.ds(head * D, D)
                pl.when(step >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                plgpu.copy_gmem_to_smem(q_TC.at[rows, columns], q_smem.at[slot], arrived)
                plgpu.copy_gmem_to_smem(g_TC.at[rows, columns], g_smem.at[slot], arrived)
                plgpu.copy_gmem_to_smem(mean_HT.at[head, rows], mean_smem.at[slot], arrived)
                plgpu.copy_gmem_to_smem(log_sum_HT.at[head, rows], log_sum_smem.at[slot], arrived)
                plgpu.copy_gmem_to_smem(start_T.at[rows], start_smem.at[slot], arrived)

            lax.fori_loop(0, group * blocks, one_block, None)
            drain(empty, stages, group * blocks)

        @pl.when(warpgroup < CONSUMERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            k_RD, v_RD, arrived = k_smem.at[warpgroup], v_smem.at[warpgroup], keys_full.at[warpgroup]
            add = _Adder(tuple(staged_smem.at[warpgroup, n] for n in range(2)) if staged_weights else None)
            first_row = pl.multiple_of(tile * TILE + warpgroup * ROWS, ROWS)
            rows, columns = pl.ds(first_row, ROWS), pl.ds(key_head * D, D)
            plgpu.copy_gmem_to_smem(k_TC.at[rows, columns], k_RD, arrived)
            plgpu.copy_gmem_to_smem(v_TC.at[rows, columns], v_RD, arrived)
            plgpu.barrier_wait(arrived)

            def one_block(step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                slot = lax.rem(step, jnp.int32(stages))
                q_BD, g_BD = q_smem.at[slot], g_smem.at[slot]
                plgpu.barrier_wait(full.at[slot])
                raw_RB, g_weight_RB = _two_products((k_RD, v_RD), (q_BD, g_BD), B)

                def per_query(ref: jax.Ref) -> jax.Array:
                    value_B = plgpu.load(ref.at[slot], layout=PER_COLUMN, optimized=False)
                    return lax.broadcast_in_dim(value_B, (ROWS, B), (1,))

                first_query = (first + lax.rem(step, blocks)) * B
                query_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 1, layout=WGMMA) + first_query
                key_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, B), 0, layout=WGMMA) + first_row
                visible_RB = (key_RB <= query_RB) & (key_RB >= per_query(start_smem))
                weight_RB = jnp.exp2(raw_RB * exponent_scale - per_query(log_sum_smem))
                weight_RB = jnp.where(visible_RB, weight_RB, 0.0)
                g_score_RB = weight_RB * (g_weight_RB - per_query(mean_smem))
                sums = add((sums[0], g_score_RB, q_BD), (sums[1], weight_RB, g_BD))
                plgpu.barrier_arrive(empty.at[slot])
                return sums

            g_k, g_v = lax.fori_loop(0, group * blocks, one_block, (_zeros(ROWS, D), _zeros(ROWS, D)))
            k_RD[...], v_RD[...] = (g_k * scale).astype(jnp.bfloat16), g_v.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_RD, g_k_TC.at[rows, columns])
            plgpu.copy_smem_to_gmem(v_RD, g_v_TC.at[rows, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    layout, result = swizzled(D), jax.ShapeDtypeStruct((T, K * D), jnp.bfloat16)
    staging = (plgpu.SMEM((CONSUMERS, 2, ROWS, B), jnp.bfloat16, transforms=swizzled(B)),) if staged_weights else ()
    return plgpu.kernel(
        kernel,
        out_type=(result, result),
        grid=(T // TILE, K),
        grid_names=("tile", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="isojax_attention_key_gradients",
        compiler_params=_PARAMETERS,
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((CONSUMERS, ROWS, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B, D), jnp.bfloat16, transforms=layout),
            plgpu.SMEM((stages, B), jnp.float32),
            plgpu.SMEM((stages, B), jnp.float32),
            plgpu.SMEM((stages, B), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
            plgpu.Barrier(num_arrivals=5, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            *staging,
        ),
    )
