"""QK-norm and rotary embedding on sm90: one warpgroup takes 64 tokens of a head at a time."""

# Dimension letters: T tokens, B tokens of a block, D head size, F half a head, N query heads, K key heads.

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import swizzled
from pallas_kernels.program import Buffer, Program, Step

BLOCK = 64


def qk_norm_rope_program(T: int, N: int, K: int, D: int, *, norm: bool, eps: float, heads: int = 1) -> Program:
    """``(q [T, N, D], k [T, K, D], cos_sin [T, D] float32[, q_norm [D], k_norm [D]]) -> (q, k)`` in bfloat16.

    ``heads`` heads share one read of the table in a block; that moves no bit. Raises ValueError where half a head is no
    multiple of 8.
    """
    F = D // 2
    if D % 16:
        raise ValueError(f"head size {D} is not a multiple of 16")

    def load(tile: jax.Ref) -> jax.Array:
        # Half heads that no swizzle fits are read element by element.
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=F % 16 == 0)

    def kernel(q_TN: jax.Ref, k_TK: jax.Ref, cos_sin_TD: jax.Ref, *refs: jax.Ref) -> None:
        norms, (q_out, k_out, x_smem, table_smem, loaded, table_loaded) = refs[:-6], refs[-6:]
        rows = pl.ds(lax.axis_index("tokens") * BLOCK, BLOCK)
        for half in range(2):
            plgpu.copy_gmem_to_smem(cos_sin_TD.at[rows, pl.ds(half * F, F)], table_smem.at[half], table_loaded)
        plgpu.barrier_wait(table_loaded)

        def rotate(source: jax.Ref, target: jax.Ref, head: jax.Array, weight_D: jax.Ref | None) -> None:
            for half in range(2):
                columns = pl.ds(head * D + half * F, F)
                plgpu.copy_gmem_to_smem(source.at[rows, columns], x_smem.at[half], loaded)
            plgpu.barrier_wait(loaded)
            halves = [
                plgpu.load(x_smem.at[half], layout=plgpu.Layout.WGMMA, optimized=F % 16 == 0).astype(jnp.float32)
                for half in range(2)
            ]
            if weight_D is not None:
                squares_B = sum(jnp.sum(x_BF * x_BF, axis=1) for x_BF in halves)
                scale_B = lax.rsqrt(squares_B * (1.0 / D) + eps)
                for half in range(2):
                    part = weight_D.at[pl.ds(half * F, F)]
                    weight_F = plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
                    # Rounded before and after the weight, as the Hugging Face reference does.
                    normed_BF = (halves[half] * scale_B[:, None]).astype(jnp.bfloat16).astype(jnp.float32)
                    weighted_BF = (normed_BF * weight_F.astype(jnp.float32)[None, :]).astype(jnp.bfloat16)
                    halves[half] = weighted_BF.astype(jnp.float32)
            cos_BF, sin_BF = (
                plgpu.load(table_smem.at[half], layout=plgpu.Layout.WGMMA, optimized=F % 16 == 0) for half in range(2)
            )
            first_BF, second_BF = halves
            x_smem[0] = (first_BF * cos_BF - second_BF * sin_BF).astype(jnp.bfloat16)
            x_smem[1] = (second_BF * cos_BF + first_BF * sin_BF).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for half in range(2):
                plgpu.copy_smem_to_gmem(x_smem.at[half], target.at[rows, pl.ds(head * D + half * F, F)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        for offset in range(heads):
            head = lax.axis_index("heads") * heads + offset

            @pl.when(head < N)
            def _(head: jax.Array = head) -> None:
                rotate(q_TN, q_out, head, norms[0] if norm else None)

            @pl.when((head >= N) & (head < N + K))
            def _(head: jax.Array = head) -> None:
                rotate(k_TK, k_out, head - N, norms[1] if norm else None)

        plgpu.wait_smem_to_gmem(0)

    half_tile = plgpu.SMEM((2, BLOCK, F), jnp.bfloat16, transforms=swizzled(F))
    call = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T, N * D), jnp.bfloat16), jax.ShapeDtypeStruct((T, K * D), jnp.bfloat16)),
        grid=(pl.cdiv(T, BLOCK), pl.cdiv(N + K, heads)),
        grid_names=("tokens", "heads"),
        kernel_name="isojax_qk_norm_rope",
        scratch_types=(
            half_tile,
            plgpu.SMEM((2, BLOCK, F), jnp.float32, transforms=swizzled(F, "float32")),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
        ),
    )
    buffers = {"q": Buffer((T, N, D), "bfloat16"), "k": Buffer((T, K, D), "bfloat16")}
    buffers |= {"q_out": buffers["q"], "k_out": buffers["k"], "cos_sin": Buffer((T, D), "float32")}
    operands: tuple[str, ...] = ("q", "k", "cos_sin")
    if norm:
        buffers |= {"q_norm": Buffer((D,), "bfloat16"), "k_norm": Buffer((D,), "bfloat16")}
        operands += ("q_norm", "k_norm")
    views = {"q": (T, N * D), "q_out": (T, N * D), "k": (T, K * D), "k_out": (T, K * D)}
    results = ("q_out", "k_out")
    return Program(buffers, operands, results, (Step("qk_norm_rope", call, operands, results, views),))
