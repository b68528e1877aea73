"""The gate and up projections on sm90 with SwiGLU of both: what is in between never leaves the registers."""

# Dimension letters: T tokens, I columns of the result, K reduction.

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.matmul.hopper_choice import SMALL_TOKENS, choose_gated_tile
from pallas_kernels.matmul.hopper_large import LargeTile, large_matmul
from pallas_kernels.program import Buffer, Program, Step
from pallas_kernels.swiglu.hopper import swiglu_program


def gated_matmul_program(T: int, I: int, K: int, *, tile: LargeTile | None = None) -> Program:  # noqa: E741
    """``(x [T, K], w [2 * I, K]) -> out [T, I]`` in bfloat16, the gate's weights first.

    ``tile`` overrides the choice, for tests and to measure. Raises ValueError where T is no multiple of 8, I is none of
    64, or K does not divide into whole steps.
    """
    buffers = {"x": Buffer((T, K), "bfloat16"), "w": Buffer((2 * I, K), "bfloat16")}
    buffers["out"] = Buffer((T, I), "bfloat16")
    if tile is None and T <= SMALL_TOKENS and I % 128 == 0:
        # Two kernels: a block that streams both halves of a column has twice the work of one that streams either, and
        # an uneven share of it costs more than few tokens' products do on their way through memory.
        buffers["products"] = Buffer((T, 2 * I), "bfloat16")
        (both,), (activate,) = matmul_program(T, 2 * I, K).steps, swiglu_program(T, I).steps
        steps = (
            Step(both.name, both.kernel, ("x", "w"), ("products",)),
            Step(activate.name, activate.kernel, ("products",), ("out",)),
        )
        return Program(buffers, ("x", "w"), ("out",), steps)
    tile = tile or choose_gated_tile(T, I, K)
    kernel = large_matmul(T, I, K, leaves=1, bias=False, out_dtype="bfloat16", tile=tile, combine=gated)
    return Program(buffers, ("x", "w"), ("out",), (Step("gated_matmul", kernel, ("x", "w"), ("out",)),))


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU of two float32 products, each rounded to bfloat16 first, as the regions one after the other round."""
    gate, up = (product.astype(jnp.bfloat16).astype(jnp.float32) for product in (gate, up))
    silu = (gate / (1.0 + jnp.exp(-gate))).astype(jnp.bfloat16).astype(jnp.float32)
    return silu * up
