"""What the matmul kernels share: a ring of stages that a loader fills and that chains of wgmma empty."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def fill(
    steps: int, stages: int, done: jax.Array, empty: jax.Ref, start: Callable[[jax.Array, jax.Array], None]
) -> jax.Array:
    """Starts the copies of ``steps`` steps, ``start(step, slot)`` each, as slots get free.

    ``done`` counts the steps of this block so far; returns the new count.
    """

    def one_step(k: jax.Array, done: jax.Array) -> jax.Array:
        slot = lax.rem(done, jnp.int32(stages))

        @pl.when(done >= stages)
        def _() -> None:
            plgpu.barrier_wait(empty.at[slot])

        start(k, slot)
        return done + 1

    return lax.fori_loop(0, steps, one_step, done)


def chain(
    shape: tuple[int, int],
    steps: int,
    stages: int,
    done: jax.Array,
    full: jax.Ref,
    empty: jax.Ref,
    operands: Callable[[jax.Array], tuple[jax.Ref, jax.Ref]],
) -> jax.Array:
    """One leaf: a chain of ``steps`` wgmma from zero over the stages from ``done`` on, ``operands(slot)`` each.

    Returns the float32 sum of ``shape``. Every slot is given back.
    """

    def multiply(acc: jax.Ref) -> jax.Array:
        def one_step(k: jax.Array, _: None) -> None:
            slot = lax.rem(done + k, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(acc, *operands(slot))
            # One wgmma group stays in flight, so the slot before this one is free only now.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _() -> None:
                plgpu.barrier_arrive(empty.at[lax.rem(done + k - 1, jnp.int32(stages))])

        lax.fori_loop(0, steps, one_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(empty.at[lax.rem(done + steps - 1, jnp.int32(stages))])
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_bias(total: jax.Array, bias_N: jax.Ref, first: jax.Array, axis: int) -> jax.Array:
    """Adds the bias of the columns from ``first`` on, which lie along ``axis``, after the sum was rounded."""
    count = total.shape[axis]
    layout = plgpu.Layout.WGMMA.reduce(1 - axis)
    added = plgpu.load(bias_N.at[pl.ds(first, count)], layout=layout, optimized=False).astype(jnp.float32)
    across = added[None, :] if axis else added[:, None]
    return (total.astype(jnp.float32) + across).astype(total.dtype)
