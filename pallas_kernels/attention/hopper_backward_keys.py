"""The keys' and values' gradients of packed attention on sm90."""

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
from pallas_kernels.attention.hopper_softmax import ROWS, WGMMA
from pallas_kernels.hopper_tools import drain, fitting_stages, swizzled

PER_COLUMN = WGMMA.reduce(0)


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
            add = Adder(tuple(staged_smem.at[warpgroup, n] for n in range(2)) if staged_weights else None)
            first_row = pl.multiple_of(tile * TILE + warpgroup * ROWS, ROWS)
            rows, columns = pl.ds(first_row, ROWS), pl.ds(key_head * D, D)
            plgpu.copy_gmem_to_smem(k_TC.at[rows, columns], k_RD, arrived)
            plgpu.copy_gmem_to_smem(v_TC.at[rows, columns], v_RD, arrived)
            plgpu.barrier_wait(arrived)

            def one_block(step: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                slot = lax.rem(step, jnp.int32(stages))
                q_BD, g_BD = q_smem.at[slot], g_smem.at[slot]
                plgpu.barrier_wait(full.at[slot])
                raw_RB, g_weight_RB = two_products((k_RD, v_RD), (q_BD, g_BD), B)

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

            g_k, g_v = lax.fori_loop(0, group * blocks, one_block, (zeros(ROWS, D), zeros(ROWS, D)))
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
        compiler_params=PARAMETERS,
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
