"""Log-probabilities over the vocabulary on sm90: which kernels run, over which buffers."""

# Dimension letters: T tokens, H hidden size, V columns of the padded logits, R rows of a warpgroup, B columns of a
# block.

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.lm_head.hopper_sums import (
    BLOCK,
    LANES,
    LEAVES,
    ROWS,
    block_sums,
    blocks_kernel,
    leaves_kernel,
    normalise_kernel,
    rows_kernel,
    scaled,
)
from pallas_kernels.matmul.hopper import matmul_kernel
from pallas_kernels.matmul.hopper_choice import choose_tile
from pallas_kernels.matmul.hopper_large import Epilogue, LargeTile, large_matmul
from pallas_kernels.matmul.hopper_weights import TAIL_ROWS, TILE_ROWS, tail_kernel, tail_start
from pallas_kernels.program import Buffer, Program, Step


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The weights as the matmul's operands ``parts``, and what comes before it for them."""

    parts: tuple[str, ...]
    buffers: dict[str, Buffer]
    steps: tuple[Step, ...]
    views: dict[str, tuple[int, ...]]


def _weights(weight_rows: int, H: int, vocab_size: int) -> _Weights:
    """Raises ValueError for a vocabulary that the weights do not hold."""
    if not 0 < vocab_size <= weight_rows:
        raise ValueError(f"vocab_size={vocab_size} is not between 1 and the weight's {weight_rows} rows")
    buffers = {"w": Buffer((weight_rows, H), "bfloat16")}
    if weight_rows % TILE_ROWS == 0:
        return _Weights(("w",), buffers, (), {})
    buffers["w_tail"] = Buffer((TAIL_ROWS, H), "bfloat16")
    tail = Step("tail", tail_kernel(weight_rows, H), ("w",), ("w_tail",))
    whole = tail_start(weight_rows)
    if not whole:
        return _Weights(("w_tail",), buffers, (tail,), {})
    return _Weights(("w", "w_tail"), buffers, (tail,), {"w": (whole, H)})


def log_prob_rows_program(T: int, H: int, weight_rows: int, *, vocab_size: int) -> Program:
    """``(x [T, H], w [weight_rows, H], temperature []) -> log_probs [T, vocab_size]`` in float32.

    Raises ValueError for a vocabulary that the weight does not hold, or more logits than 32 bits can number.
    """
    weights = _weights(weight_rows, H, vocab_size)
    V = -(-vocab_size // BLOCK) * BLOCK
    if T * V >= 2**31:
        raise ValueError(f"{T} rows of {V} logits are more than 32 bits can number; compute fewer rows at once")
    padded = -(-T // LANES) * LANES
    buffers = {
        "x": Buffer((T, H), "bfloat16"),
        **weights.buffers,
        "temperature": Buffer((), "float32"),
        "logits": Buffer((T, V), "float32"),
        "sums": Buffer((V // BLOCK, 2, padded), "float32"),
        "leaf_sums": Buffer((LEAVES, 2, padded), "float32"),
        "constants": Buffer((2, padded), "float32"),
        "log_probs": Buffer((T, vocab_size), "float32"),
    }
    scalar = {"temperature": (1,)}
    flat = {**scalar, "logits": (T * V,), "log_probs": (T * vocab_size,)}
    # With a tail every tile must lie in one of the two parts.
    tile = choose_tile(T, V, H, 1, within=TAIL_ROWS if len(weights.parts) > 1 else 0)
    logits = matmul_kernel(T, V, H, leaves=1, out_dtype="float32", tile=tile, weight_parts=len(weights.parts))
    steps = (
        *weights.steps,
        Step("logits", logits, ("x", *weights.parts), ("logits",), weights.views),
        Step("blocks", blocks_kernel(T, V, vocab_size), ("logits", "temperature"), ("sums",), scalar),
        Step("leaves", leaves_kernel(T, V // BLOCK, 2), ("sums",), ("leaf_sums",)),
        Step("constants", rows_kernel(T, 2), ("leaf_sums",), ("constants",)),
        Step(
            "rows",
            normalise_kernel(T, V, vocab_size),
            ("logits", "temperature", "constants"),
            ("log_probs",),
            flat,
        ),
    )
    return Program(buffers, ("x", "w", "temperature"), ("log_probs",), steps)


def token_log_probs_program(T: int, H: int, weight_rows: int, *, vocab_size: int) -> Program:
    """``(x [T, H], w [weight_rows, H], targets [T], temperature []) -> log_probs [T]`` in float32.

    Bit for bit the targets' entries of `log_prob_rows_program`; no logit is written. Raises ValueError where T is no
    multiple of 128 or the weight does not hold the vocabulary.
    """
    if T % LANES:
        raise ValueError(f"T={T} is not a multiple of {LANES}")
    weights = _weights(weight_rows, H, vocab_size)
    V = -(-vocab_size // BLOCK) * BLOCK

    def consume(
        logits_RB: jax.Array, operands: list[jax.Ref], results: list[jax.Ref], row: jax.Array, column: jax.Array
    ) -> None:
        (temperature, targets_T), (sums,) = operands, results
        rows, block = pl.ds(row, ROWS), lax.div(column, jnp.int32(BLOCK))
        max_R, sum_R = block_sums(logits_RB, temperature[0], column, vocab_size)
        target_R = plgpu.load(targets_T.at[rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        column_RB = plgpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=plgpu.Layout.WGMMA)
        here_RB = column_RB == lax.broadcast_in_dim(target_R - column, (ROWS, BLOCK), (0,))
        sums[block, 0, rows] = max_R
        sums[block, 1, rows] = sum_R
        sums[block, 2, rows] = jnp.max(jnp.where(here_RB, scaled(logits_RB, temperature[0]), -jnp.inf), axis=1)

    sums = jax.ShapeDtypeStruct((V // BLOCK, 3, T), jnp.float32)
    tile = LargeTile(columns=BLOCK, depth=min(64, choose_tile(8, V, H, 1).depth))
    fused = large_matmul(
        T,
        V,
        H,
        leaves=1,
        bias=False,
        out_dtype="float32",
        tile=tile,
        weight_parts=len(weights.parts),
        epilogue=Epilogue(consume, 2, (sums,)),
    )
    buffers = {
        "x": Buffer((T, H), "bfloat16"),
        **weights.buffers,
        "targets": Buffer((T,), "int32"),
        "temperature": Buffer((), "float32"),
        "sums": Buffer(sums.shape, "float32"),
        "leaf_sums": Buffer((LEAVES, 3, T), "float32"),
        "log_probs": Buffer((T,), "float32"),
    }
    views = {"temperature": (1,), **weights.views}
    steps = (
        *weights.steps,
        Step("logits", fused, ("x", *weights.parts, "temperature", "targets"), ("sums",), views),
        Step("leaves", leaves_kernel(T, V // BLOCK, 3), ("sums",), ("leaf_sums",)),
        Step("rows", rows_kernel(T, 3), ("leaf_sums",), ("log_probs",)),
    )
    return Program(buffers, ("x", "w", "targets", "temperature"), ("log_probs",), steps)
