"""The queries' gradients of packed attention on sm90, and every row's log-sum-exp."""

# Dimension letters: T tokens, H query heads, K key heads, D head size, R rows of a warpgroup (64), B rows of the block
# that a warpgroup meets in one step.

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_backward_products import CONSUMERS, PARAMETERS, TILE, Adder, two_products, zeros
from pallas_kernels.attention.hopper_softmax import PER_ROW, ROWS, WGMMA
from pallas_kernels.hopper_tools import drain, fitting_stages, swizzled


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
            add = Adder((staged_smem.at[warpgroup],) if staged_weights else None)
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
                raw_RB, g_weight_RB = two_products((q_RD, g_RD), (k_smem.at[slot], v_smem.at[slot]), B)
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
            state = (*(plgpu.layout_cast(value, PER_ROW) for value in nothing), zeros(ROWS, D))
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
        compiler_params=PARAMETERS,
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
