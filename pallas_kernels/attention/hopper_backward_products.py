"""What the two kernels of attention's backward share: their tiles and their products."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.hopper_softmax import ROWS, WGMMA

CONSUMERS = 2
TILE = CONSUMERS * ROWS
PARAMETERS = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)


def zeros(*shape: int) -> jax.Array:
    """fp32 zeros, laid out as a product is."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)


def two_products(a: tuple[jax.Ref, jax.Ref], b: tuple[jax.Ref, jax.Ref], columns: int) -> tuple[jax.Array, jax.Array]:
    """a[0] @ b[0].T and a[1] @ b[1].T, fp32 [ROWS, columns]; waits for the tensor cores once."""

    def products(first: jax.Ref, second: jax.Ref) -> tuple[jax.Array, jax.Array]:
        plgpu.wgmma(first, a[0], b[0].transpose((1, 0)))
        plgpu.wgmma(second, a[1], b[1].transpose((1, 0)))
        return first[...], second[...]

    kind = plgpu.ACC((ROWS, columns), jnp.float32)
    return pl.run_scoped(products, kind, kind)


class Adder:
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
