"""QK-norm and rotary embedding on sm90: one warpgroup takes 64 tokens of one head."""

# Dimension letters: T tokens, B tokens of a block, D head size, F half a head, N query heads, K key heads.

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, swizzled
from pallas_kernels.program import Buffer, Program, Step

BLOCK = 64
PIECE = 32
#: Rows that are stored at once.
TOGETHER = 8


def qk_norm_rope_program(T: int, N: int, K: int, D: int, *, norm: bool, eps: float) -> Program:
    """``(qkv [T, (N + 2K) * D], cos_sin [T, D] float32[, q_norm [D], k_norm [D]]) -> (q, k, v)`` in bfloat16.

    q is [T, N, D], k and v are [T, K, D]. Raises ValueError where half a head is no multiple of 8.
    """
    buffers, norms = _shared_buffers(T, N, K, D, norm)
    buffers |= dict.fromkeys(("k", "v"), Buffer((T, K, D), "bfloat16"))
    operands, results = ("qkv", "cos_sin", *norms), ("q", "k", "v")
    views = {"q": (T, N * D), "k": (T, K * D), "v": (T, K * D)}
    call = _kernel(T, N, K, D, norm=norm, eps=eps, rows=None)
    return Program(buffers, operands, results, (Step("qk_norm_rope", call, operands, results, views),))


def paged_qk_norm_rope_program(
    T: int, N: int, K: int, D: int, *, pages: int, page: int, norm: bool, eps: float
) -> Program:
    """``(qkv, cos_sin, slots [T] int32, k_cache, v_cache[, q_norm, k_norm]) -> (q, k_cache, v_cache)``.

    The same values as `qk_norm_rope_program`, keys and values in the rows ``slots`` of the caches [pages, page, K, D],
    which are written in place; a token with a slot below 0 is left out. ``pages`` is a bound, as in paged attention.
    """
    buffers, norms = _shared_buffers(T, N, K, D, norm)
    caches = ("k_cache", "v_cache")
    buffers |= {"slots": Buffer((T,), "int32"), **dict.fromkeys(caches, Buffer((pages, page, K, D), "bfloat16", True))}
    operands, results = ("qkv", "cos_sin", "slots", *caches, *norms), ("q", *caches)
    views = {"q": (T, N * D), **dict.fromkeys(caches, (pages * page, K * D))}
    call = _kernel(T, N, K, D, norm=norm, eps=eps, rows=pages * page)
    return Program(buffers, operands, results, (Step("paged_qk_norm_rope", call, operands, results, views),))


def _shared_buffers(T: int, N: int, K: int, D: int, norm: bool) -> tuple[dict[str, Buffer], tuple[str, ...]]:
    buffers = {"qkv": Buffer((T, (N + 2 * K) * D), "bfloat16"), "cos_sin": Buffer((T, D), "float32")}
    buffers["q"] = Buffer((T, N, D), "bfloat16")
    norms = ("q_norm", "k_norm") if norm else ()
    return buffers | dict.fromkeys(norms, Buffer((D,), "bfloat16")), norms


def _kernel(
    T: int, N: int, K: int, D: int, *, norm: bool, eps: float, rows: int | None
) -> Callable[..., tuple[jax.Array, ...]]:
    """rows: of the caches that keys and values go to; None for arrays of their own."""
    F = D // 2
    if D % 16:
        raise ValueError(f"head size {D} is not a multiple of 16")

    def load(tile: jax.Ref) -> jax.Array:
        # Half heads that no swizzle fits are read element by element.
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=F % 16 == 0)

    paged = rows is not None
    # Where a block has all tokens only they are copied, since zeros beyond the last one take their time too.
    copied = T if T < BLOCK and T % 8 == 0 else BLOCK
    # A thread stores a column or two of a row. Rows too short for that are copied, one after the other.
    stored = D % 128 == 0 and T % TOGETHER == 0
    lanes = plgpu.Layout.WG_STRIDED((D,), vec_size=D // 128) if stored else None

    def kernel(qkv_TC: jax.Ref, cos_sin_TD: jax.Ref, *refs: jax.Ref) -> None:
        names = iter(refs)
        slots_T = next(names) if paged else None
        for _ in range(2 if paged else 0):
            # The caches as operands: the results are the same memory.
            next(names)
        norms = [next(names) for _ in range(2 if norm else 0)]
        q_out, k_out, v_out, x_smem, table_smem, loaded, table_loaded = (next(names) for _ in range(7))
        slots_smem, row_smem, slots_loaded = (next(names) for _ in range(3)) if paged else (None, None, None)
        head, first_token = lax.axis_index("head"), lax.axis_index("tokens") * BLOCK
        block, filled = pl.ds(first_token, copied), pl.ds(0, copied)
        # All copies are under way before the first wait.
        for half in range(2):
            columns = pl.ds(head * D + half * F, F)
            plgpu.copy_gmem_to_smem(qkv_TC.at[block, columns], x_smem.at[half, filled], loaded)

        @pl.when(head < N + K)
        def _fetch_table() -> None:
            for half in range(2):
                columns = pl.ds(half * F, F)
                plgpu.copy_gmem_to_smem(cos_sin_TD.at[block, columns], table_smem.at[half, filled], table_loaded)

        if paged:

            @pl.when(head >= N)
            def _fetch_slots() -> None:
                plgpu.copy_gmem_to_smem(slots_T.at[block], slots_smem.at[filled], slots_loaded)

        plgpu.barrier_wait(loaded)

        def put(target: jax.Ref, head: jax.Array) -> None:
            for half in range(2):
                columns = pl.ds(head * D + half * F, F)
                plgpu.copy_smem_to_gmem(x_smem.at[half, filled], target.at[block, columns])

        def put_key_or_value(target: jax.Ref, head: jax.Array) -> None:
            if not paged:
                put(target, head)
                return
            # Out of the swizzled tile, since a row of the cache is copied alone. In pieces that the compiler has no
            # swizzle of its own for: it would not undo that where a single row is copied.
            piece = PIECE if F % PIECE == 0 else F
            for half in range(2):
                value_BF = load(x_smem.at[half])
                for start in range(0, F, piece):
                    columns = pl.ds(half * F + start, piece)
                    row_smem[:, columns] = value_BF[:, start : start + piece]
            plgpu.commit_smem()
            plgpu.barrier_wait(slots_loaded)
            columns = pl.ds(head * D, D)

            def copy_row(row: jax.Array, _: None) -> None:
                slot = slots_smem[row]

                @pl.when(slot >= 0)
                def _() -> None:
                    plgpu.copy_smem_to_gmem(row_smem.at[pl.ds(row, 1)], target.at[pl.ds(slot, 1), columns])

            def store_rows(group: jax.Array, _: None) -> None:
                # All loads before the first store, so that their latencies overlap.
                rows = [group * TOGETHER + offset for offset in range(TOGETHER)]
                slots = [slots_smem[row] for row in rows]
                values = [plgpu.load(row_smem.at[row], layout=lanes) for row in rows]
                for slot, value_D in zip(slots, values, strict=True):

                    @pl.when(slot >= 0)
                    def _(slot: jax.Array = slot, value_D: jax.Array = value_D) -> None:
                        target[slot, columns] = value_D

            rows = jnp.minimum(BLOCK, T - first_token)
            if lanes is None:
                lax.fori_loop(0, rows, copy_row, None)
            else:
                lax.fori_loop(0, lax.div(rows, jnp.int32(TOGETHER)), store_rows, None)

        def rotate(weight_D: jax.Ref | None) -> None:
            halves = [load(x_smem.at[half]).astype(jnp.float32) for half in range(2)]
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
            plgpu.barrier_wait(table_loaded)
            cos_BF, sin_BF = (load(table_smem.at[half]) for half in range(2))
            first_BF, second_BF = halves
            x_smem[0] = (first_BF * cos_BF - second_BF * sin_BF).astype(jnp.bfloat16)
            x_smem[1] = (second_BF * cos_BF + first_BF * sin_BF).astype(jnp.bfloat16)
            plgpu.commit_smem()

        @pl.when(head < N)
        def _query() -> None:
            rotate(norms[0] if norm else None)
            put(q_out, head)

        @pl.when((head >= N) & (head < N + K))
        def _key() -> None:
            rotate(norms[1] if norm else None)
            put_key_or_value(k_out, head - N)

        @pl.when(head >= N + K)
        def _value() -> None:
            put_key_or_value(v_out, head - N - K)

        plgpu.wait_smem_to_gmem(0)

    half_tile = plgpu.SMEM((2, BLOCK, F), jnp.bfloat16, transforms=swizzled(F))
    writes = (plgpu.SMEM((BLOCK,), jnp.int32), plgpu.SMEM((BLOCK, D), jnp.bfloat16), plgpu.Barrier())
    shapes = ((T, N * D), (rows or T, K * D), (rows or T, K * D))
    return chained_kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
        grid=(pl.cdiv(T, BLOCK), N + 2 * K),
        grid_names=("tokens", "head"),
        kernel_name="isojax_paged_qk_norm_rope" if paged else "isojax_qk_norm_rope",
        scratch_types=(
            half_tile,
            plgpu.SMEM((2, BLOCK, F), jnp.float32, transforms=swizzled(F, "float32")),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2),
            *(writes if paged else ()),
        ),
    )
