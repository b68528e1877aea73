"""How a trainer must lay out a batch: for sealed kernels, and for a mesh."""

from typing import NotRequired, TypedDict

from pallas_kernels.kernel_shapes import TOKEN_STEP, KernelShapes


class Packing(TypedDict):
    """Arguments of `isojax.pack`: see there."""

    start_multiple: int
    sealed_lengths: tuple[int, ...]
    shards: NotRequired[int]


UNSEALED = Packing(start_multiple=1, sealed_lengths=())
"""Where no kernels are sealed: sequences side by side, in a batch of any length."""


def packing_of(shapes: KernelShapes) -> Packing:
    """What `isojax.pack` needs for these kernels: sequences start where a tile of queries can, in a sealed batch.

    The attention kernel makes a sequence that starts at another row NaN.
    """
    return Packing(start_multiple=TOKEN_STEP, sealed_lengths=shapes.trainer_tokens)
