"""What the Hopper kernels share: shared-memory tilings, the declared tree, the size of the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

#: Multiprocessors of the card that kernels are lowered for. It sets persistent grids, hence the module's bytes.
SM_COUNT = 132

#: Shared memory that one block may take on sm90.
SHARED_BYTES = 232448


def follow() -> None:
    """Waits for the launch before, and lets the next one take its place on the card while this one runs.

    In this order, since a launch that waits for the one before it then also knows those before that one as done.
    """
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()


def chained_kernel(body: Callable[..., None], **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """`plgpu.kernel`, whose blocks may be placed before the launch before has ended; they read nothing until then.

    That hides part of a launch's cost and moves no bit.
    """

    def kernel(*refs: jax.Ref) -> None:
        follow()
        body(*refs)

    return plgpu.kernel(kernel, **options)


def early_kernel(body: Callable[..., None], **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """`plgpu.kernel` for a launch right behind a `chained_kernel`: its blocks work while that one runs.

    Before its references the body is given a function that waits for the launch before; a warpgroup of every block has
    to call it. Until then a block may read what earlier launches wrote, for the one before waited for them before it
    let this one be placed, and may write what that one neither reads nor writes.
    """

    def kernel(*refs: jax.Ref) -> None:
        body(follow, *refs)

    return plgpu.kernel(kernel, **options)


def fitting_stages(most: int, steps: int, stage_bytes: int, other_bytes: int) -> int:
    """Pipeline stages: at most ``most`` and ``steps``, and no more than fit beside ``other_bytes``.

    Raises ValueError where not even two fit.
    """
    # Every array starts at a multiple of 1024 bytes; barriers take the last part.
    fit = (SHARED_BYTES - other_bytes - 8192) // stage_bytes
    if fit < min(2, steps):
        raise ValueError(f"a stage of {stage_bytes} bytes does not fit twice beside {other_bytes} bytes")
    return min(most, steps, fit)


def sm_count() -> int:
    """Blocks of a persistent grid. Fixed, so that a module does not depend on the machine that lowers it."""
    return SM_COUNT


def swizzled(columns: int, dtype: str = "bfloat16") -> tuple[plgpu.TilingTransform | plgpu.SwizzleTransform, ...]:
    """The shared-memory layout that wgmma and TMA share, for tiles ``columns`` wide; plain where none fits."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    if swizzle == 16:
        return ()
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def fold(leaf: Callable[[int], jax.Array], leaves: int) -> jax.Array:
    """Sums ``leaf(0) ... leaf(leaves - 1)`` as ((l0+l1)+(l2+l3))+..., evaluated depth first.

    Depth first keeps at most log2(leaves) partial sums waiting. The lower index is always the left operand.
    """
    if leaves < 1 or leaves & (leaves - 1):
        raise ValueError(f"leaves={leaves} is not a power of two")

    def subtree(first: int, count: int) -> jax.Array:
        if count == 1:
            return leaf(first)
        left = subtree(first, count // 2)
        return left + subtree(first + count // 2, count // 2)

    return subtree(0, leaves)


def fold_runs(
    leaf: Callable[[jax.Array | int], jax.Array],
    leaves: int,
    shape: tuple[int, int],
    waiting: Sequence[jax.Ref],
    run: int = 4,
) -> jax.Array:
    """The same sum as `fold`, where registers hold few leaves, each float32 of ``shape``.

    With a ``run`` of 4 one leaf and the sum of one pair wait in registers, with 2 one leaf; the sums of larger subtrees
    wait in ``waiting``, one reference a level.
    """
    if leaves <= 2:
        return fold(leaf, leaves)
    if leaves & (leaves - 1):
        raise ValueError(f"leaves={leaves} is not a power of two")

    def two(first: jax.Array | int) -> jax.Array:
        return leaf(first) + leaf(first + 1)

    def four(first: int) -> jax.Array:
        def one_pair(pair: jax.Array, earlier: jax.Array) -> jax.Array:
            total = two(first + 2 * pair)
            return lax.cond(pair > 0, lambda: earlier + total, lambda: total)

        # A loop, because with every leaf unrolled the compiler no longer keeps the tensor cores busy.
        nothing = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, 2, one_pair, nothing)

    def subtree(first: int, count: int, levels: Sequence[jax.Ref]) -> jax.Array:
        if count == run:
            return four(first) if run == 4 else two(first)
        levels[0][...] = subtree(first, count // 2, levels[1:])
        right = subtree(first + count // 2, count // 2, levels[1:])
        return plgpu.load(levels[0], layout=plgpu.Layout.WGMMA) + right

    return subtree(0, leaves, waiting)


def drain(empty: jax.Ref, stages: int, done: jax.Array) -> None:
    """Waits until the consumers released every stage that ``done`` loads filled.

    A producer that exits earlier could leave a block while its peers in the cluster still signal it.
    """
    for slot in range(stages):

        @pl.when(slot < done)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(empty.at[slot])


def elementwise_chunk(length: int) -> tuple[int, object]:
    """The elements one warpgroup takes of a flat array of ``length``, 16-byte accesses where they divide it.

    Raises ValueError where ``length`` is no multiple of 128.
    """
    for chunk, vector in ((2048, 8), (1024, 8), (512, 4), (256, 2), (128, 1)):
        if length % chunk == 0:
            return chunk, plgpu.Layout.WG_STRIDED((chunk,), vec_size=vector)
    raise ValueError(f"{length} elements are not a multiple of 128")
