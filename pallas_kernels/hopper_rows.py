"""Rows of any length in registers: loads, stores and sums with one fixed order, for one warpgroup a row."""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LANES = 128
#: TMA's largest box along one dimension.
BOX = 256


class Row:
    """How one warpgroup holds a row of ``length`` elements of a bfloat16 array.

    Lane l holds elements v*(l + 128*i) .. + v-1 for i = 0, 1, ...; v and the number of i depend on the length alone, so
    the order of a sum over the row does too. Rows that are no multiple of 128 are padded with zeros in shared memory.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.padded = -(-length // LANES) * LANES
        self.direct = length == self.padded
        vector = next(v for v in (8, 4, 2, 1) if self.padded % (LANES * v) == 0)
        self.layout = plgpu.Layout.WG_STRIDED((self.padded,), vec_size=vector)
        self.boxes = [(at, min(BOX, self.padded - at)) for at in range(0, self.padded, BOX)]

    def scratch(self, loads: int) -> tuple[object, ...]:
        """Scratch for a kernel that loads ``loads`` rows at a time: buffers and one barrier, empty when not needed."""
        if self.direct:
            return ()
        return (
            plgpu.SMEM((loads, self.padded), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=loads * len(self.boxes)),
        )

    def load(self, rows: list[tuple[jax.Ref, jax.Array | None]], scratch: tuple[jax.Ref, ...]) -> list[jax.Array]:
        """Loads the given rows (reference [R, length] and row index; None for a 1-D reference) as float32."""
        if self.direct:
            refs = [ref if at is None else ref.at[at] for ref, at in rows]
            return [plgpu.load(ref, layout=self.layout).astype(jnp.float32) for ref in refs]
        staged, barrier = scratch
        for slot, (ref, at) in enumerate(rows):
            for start, size in self.boxes:
                columns = self._columns(start, size)
                source = ref.at[columns] if at is None else ref.at[at, columns]
                plgpu.copy_gmem_to_smem(source, staged.at[slot, pl.ds(start, size)], barrier)
        plgpu.barrier_wait(barrier)
        return [plgpu.load(staged.at[slot], layout=self.layout).astype(jnp.float32) for slot in range(len(rows))]

    def store(self, value: jax.Array, ref: jax.Ref, at: jax.Array, scratch: tuple[jax.Ref, ...], slot: int) -> None:
        """Writes ``value`` as bfloat16 into row ``at``; finishes before the kernel may reuse the slot."""
        if self.direct:
            ref[at] = value.astype(jnp.bfloat16)
            return
        staged, _ = scratch
        staged[slot] = value.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for start, size in self.boxes:
            # Only what the row has: a contiguous store is not cut at the row's end but runs into the next row.
            part = pl.ds(start, min(size, self.length - start))
            plgpu.copy_smem_to_gmem(staged.at[slot, part], ref.at[at, part])
        plgpu.wait_smem_to_gmem(0)

    def _columns(self, start: int, size: int) -> pl.Slice:
        if start + size <= self.length:
            return pl.ds(start, size)
        # The last box reaches over the row's end, where TMA fills zeros and drops stores. Only a start that is no
        # constant may do that, so this one is computed.
        return pl.ds(lax.axis_index("row") * 0 + start, size)
