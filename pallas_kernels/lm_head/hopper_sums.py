"""Sums over the vocabulary on sm90, of blocks and leaves, and the rows that they normalise."""

# Dimension letters: T tokens, H hidden size, V columns of the padded logits, R rows of a warpgroup, B columns of a
# block.
# A block's maximum and sum are of B neighbouring columns; a leaf folds its blocks in ascending order; leaves fold as
# the declared tree. Each sum is relative to its own maximum, so a leaf needs nothing of another one.

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper_tools import chained_kernel, fold, swizzled

ROWS, BLOCK, LEAVES = 64, 128, 8
#: Rows of one warp-wide vector, and blocks whose sums are read at once.
LANES, TOGETHER = 128, 32
KernelCall = Callable[..., tuple[jax.Array, ...]]


def scaled(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits / temperature, rounded before anything else uses it.

    The compiler may fuse the product inside of a division into a subtraction that follows, in one kernel and not in
    another. Adding a zero that it can't know, in integers, keeps the quotient's own rounding.
    """
    divisor = lax.broadcast_in_dim(temperature, logits.shape, ())
    unknown_zero = lax.bitcast_convert_type(divisor - divisor, jnp.int32)
    quotient = lax.bitcast_convert_type(logits / divisor, jnp.int32)
    return lax.bitcast_convert_type(quotient + unknown_zero, jnp.float32)


def block_sums(
    logits_RB: jax.Array, temperature: jax.Array, first: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """Maximum and sum of exp(x - maximum) of one block, x = logits / temperature, without columns past ``vocab``."""
    scaled_RB = scaled(logits_RB, temperature)
    column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=plgpu.Layout.WGMMA)
    scaled_RB = jnp.where(column_RB < vocab - first, scaled_RB, -jnp.inf)
    max_R = jnp.max(scaled_RB, axis=1)
    return max_R, jnp.sum(jnp.exp(scaled_RB - max_R[:, None]), axis=1)


def blocks_kernel(T: int, V: int, vocab: int) -> KernelCall:
    padded = pl.cdiv(T, LANES) * LANES

    def kernel(logits_TV: jax.Ref, temperature: jax.Ref, sums: jax.Ref, tile: jax.Ref, loaded: jax.Ref) -> None:
        rows, block = lax.axis_index("rows") * ROWS, lax.axis_index("block")
        plgpu.copy_gmem_to_smem(logits_TV.at[pl.ds(rows, ROWS), pl.ds(block * BLOCK, BLOCK)], tile, loaded)
        plgpu.barrier_wait(loaded)
        logits_RB = plgpu.load(tile, layout=plgpu.Layout.WGMMA)
        max_R, sum_R = block_sums(logits_RB, temperature[0], block * BLOCK, vocab)
        sums[block, 0, pl.ds(rows, ROWS)] = max_R
        sums[block, 1, pl.ds(rows, ROWS)] = sum_R

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((V // BLOCK, 2, padded), jnp.float32),),
        grid=(padded // ROWS, V // BLOCK),
        grid_names=("rows", "block"),
        kernel_name="isojax_vocabulary_blocks",
        scratch_types=(
            plgpu.SMEM((ROWS, BLOCK), jnp.float32, transforms=swizzled(BLOCK, "float32")),
            plgpu.Barrier(),
        ),
    )


def leaves_kernel(T: int, blocks: int, kinds: int) -> KernelCall:
    padded = pl.cdiv(T, LANES) * LANES
    each = pl.cdiv(blocks, LEAVES)
    steps = pl.cdiv(each, TOGETHER)
    lane = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def kernel(sums: jax.Ref, leaf_sums: jax.Ref) -> None:
        leaf, rows = lax.axis_index("leaf"), pl.ds(lax.axis_index("rows") * LANES, LANES)
        first = leaf * each
        count = jnp.clip(blocks - first, 0, each)

        def read(index: jax.Array, what: int, default: float) -> jax.Array:
            # Beyond the leaf's end the last block is read again and left out.
            value = plgpu.load(sums.at[jnp.minimum(first + index, blocks - 1), what, rows], layout=lane)
            inside = lax.broadcast_in_dim(jnp.asarray(count - index, jnp.int32), (LANES,), ()) > 0
            return jnp.where(inside, value, default)

        def maxima(what: int) -> jax.Array:
            def step(number: jax.Array, high: jax.Array) -> jax.Array:
                for value in [read(number * TOGETHER + i, what, -jnp.inf) for i in range(TOGETHER)]:
                    high = jnp.maximum(high, value)
                return high

            start = plgpu.layout_cast(jnp.full((LANES,), -jnp.inf, jnp.float32), lane)
            return lax.fori_loop(0, steps, step, start)

        def total(step: jax.Array, sum_so_far: jax.Array) -> jax.Array:
            indices = [step * TOGETHER + i for i in range(TOGETHER)]
            parts = [(read(index, 0, -jnp.inf), read(index, 1, 0.0)) for index in indices]
            for block_max, block_sum in parts:
                sum_so_far = sum_so_far + block_sum * jnp.exp(block_max - finite)
            return sum_so_far

        high = maxima(0)
        finite = jnp.where(high == -jnp.inf, 0.0, high)
        zero = plgpu.layout_cast(jnp.zeros((LANES,), jnp.float32), lane)
        leaf_sums[leaf, 0, rows] = high
        leaf_sums[leaf, 1, rows] = lax.fori_loop(0, steps, total, zero)
        if kinds == 3:
            leaf_sums[leaf, 2, rows] = maxima(2)

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((LEAVES, kinds, padded), jnp.float32),),
        grid=(padded // LANES, LEAVES),
        grid_names=("rows", "leaf"),
        kernel_name="isojax_vocabulary_leaves",
    )


def rows_kernel(T: int, kinds: int) -> KernelCall:
    """Each row's maximum and log of its sum; with three kinds the target's log-probability instead."""
    padded = pl.cdiv(T, LANES) * LANES
    lane = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def kernel(leaf_sums: jax.Ref, constants: jax.Ref) -> None:
        rows = pl.ds(lax.axis_index("rows") * LANES, LANES)

        def read(leaf: int, what: int) -> jax.Array:
            return plgpu.load(leaf_sums.at[leaf, what, rows], layout=lane)

        def largest(what: int) -> jax.Array:
            values = [read(leaf, what) for leaf in range(LEAVES)]
            return functools.reduce(jnp.maximum, values)

        maximum = largest(0)
        finite = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        log_sum = jnp.log(fold(lambda leaf: read(leaf, 1) * jnp.exp(read(leaf, 0) - finite), LEAVES))
        if kinds == 3:
            constants[rows] = (largest(2) - maximum) - log_sum
        else:
            constants[0, rows] = maximum
            constants[1, rows] = log_sum

    shape = (padded,) if kinds == 3 else (2, padded)
    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(shape, jnp.float32),),
        grid=(padded // LANES,),
        grid_names=("rows",),
        kernel_name="isojax_vocabulary_rows",
    )


def normalise_kernel(T: int, V: int, vocab: int) -> KernelCall:
    if vocab < LANES:
        return _normalise_narrow_kernel(T, V, vocab)
    chunk = max(size for size in (2048, 1024, 512, 256, 128) if size <= vocab)
    chunks = vocab // chunk
    lane = plgpu.Layout.WG_STRIDED((chunk,), vec_size=1)

    def kernel(logits: jax.Ref, temperature: jax.Ref, constants: jax.Ref, out: jax.Ref) -> None:
        row = lax.axis_index("row")
        maximum, log_sum = constants[0, row], constants[1, row]

        def write(at: jax.Array | int) -> None:
            raw = plgpu.load(logits.at[pl.ds(row * V + at, chunk)], layout=lane)
            out[pl.ds(row * vocab + at, chunk)] = (scaled(raw, temperature[0]) - maximum) - log_sum

        number = lax.axis_index("chunk")
        write(number * chunk)
        if vocab % chunk:
            # What is left of the row is written with the end of its last whole chunk, again and to the same values.
            @pl.when(number == chunks - 1)
            def _rest() -> None:
                write(vocab - chunk)

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * vocab,), jnp.float32),),
        grid=(chunks, T),
        grid_names=("chunk", "row"),
        kernel_name="isojax_log_prob_rows",
    )


def _normalise_narrow_kernel(T: int, V: int, vocab: int) -> KernelCall:
    """Rows that are shorter than a warpgroup is wide leave shared memory a number at a time."""
    lane = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)

    def kernel(logits: jax.Ref, temperature: jax.Ref, constants: jax.Ref, out: jax.Ref, staged: jax.Ref) -> None:
        row = lax.axis_index("row")
        raw = plgpu.load(logits.at[pl.ds(row * V, LANES)], layout=lane)
        staged[...] = (scaled(raw, temperature[0]) - constants[0, row]) - constants[1, row]

        def write(column: jax.Array, _: None) -> None:
            out[row * vocab + column] = staged[column]

        lax.fori_loop(0, vocab, write, None)

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * vocab,), jnp.float32),),
        grid=(T,),
        grid_names=("row",),
        kernel_name="isojax_log_prob_rows_narrow",
        scratch_types=(plgpu.SMEM((LANES,), jnp.float32),),
    )
