"""How the work on single tokens over paged keys is cut on sm90, and the kernel that merges what was cut."""

# Dimension letters: T tokens, H query heads, K key heads, G query heads of a key head, D head size, E head size padded
# to whole warpgroups, L tokens looked up at once.

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import hopper_softmax as softmax
from pallas_kernels.attention.hopper_softmax import ROWS, State
from pallas_kernels.hopper_tools import chained_kernel, sm_count

#: More parts than a batch may have.
MOST_PARTS = 2**21
#: Blocks that merge many tokens, a multiprocessor.
BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the work on single tokens is cut, and the memory that its states take.

    At most ``singles`` tokens of a batch are the only ones of their requests, with at most ``splits`` splits each. With
    ``whole`` a part is a whole token, whose splits merge in registers in the declared order, and there are no states;
    otherwise it is one split, and states are of tokens that have several.
    """

    T: int
    H: int
    K: int
    D: int
    singles: int
    splits: int
    whole: bool

    @property
    def most(self) -> int:
        """Parts that can exist at once."""
        return self.singles * (1 if self.whole else self.splits)

    @property
    def G(self) -> int:
        return self.H // self.K

    @property
    def L(self) -> int:
        """Tokens that are looked up at once."""
        return min(512, max(128, 1 << (self.T - 1).bit_length()))

    @property
    def E(self) -> int:
        """Columns of a state in memory: each thread of a warpgroup reads as many."""
        return -(-self.D // 128) * 128

    @property
    def acc(self) -> tuple[int, int]:
        """Shape of the weighted values, float32: a row a query head of a part."""
        return self.most * self.H, self.E

    @property
    def stats(self) -> tuple[int, int, int]:
        """Shape of maxima and sums, float32, by item."""
        return self.most * self.K, 2, ROWS

    @property
    def merges(self) -> tuple[int, int]:
        """Shape of what is to merge, int32: in the first row how many tokens, then token, first part, parts of each."""
        return self.singles + 1, 3


def combine_parts(parts: Parts, *, heads: int) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel ``(acc, stats, merges, out [T*H*D]) -> out``, which it writes in place.

    Merges the parts of each token that ``merges`` names in ascending order; other tokens' rows it leaves alone. A block
    takes ``heads`` neighbouring query heads, which moves no bit.
    """
    T, H, K, G, D, E = parts.T, parts.H, parts.K, parts.G, parts.D, parts.E
    # Parts whose loads are under way at once, so that their latencies overlap: more where few blocks share the card.
    at_once = max(1, (16 if heads == 1 else 8) // heads)
    # A step of many tokens has mostly nothing to merge, and blocks that find nothing take their time too.
    blocks = parts.singles if heads == 1 else min(parts.singles, max(1, BLOCKS * sm_count() * heads // H))
    column = plgpu.Layout.WG_STRIDED((E,), vec_size=1)

    def everywhere(value: jax.Array | float, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((E,), value, dtype), column)

    def kernel(
        acc: jax.Ref,
        stats: jax.Ref,
        merges: jax.Ref,
        out_before: jax.Ref,
        out_C: jax.Ref,
        out_smem: jax.Ref,
    ) -> None:
        # The result as an operand: it is the same memory.
        del out_before
        first_head = lax.axis_index("heads") * heads

        def load(part: jax.Array, head: jax.Array) -> State:
            # A thread takes a column; a row's maximum and sum are in every thread.
            key_head = lax.div(head, jnp.int32(G))
            item, row = part * K + key_head, head - key_head * G
            values = plgpu.load(acc.at[part * H + head], layout=column)
            return State(everywhere(stats[item, 0, row]), everywhere(stats[item, 1, row]), values)

        def one_token(number: jax.Array) -> jax.Array:
            token, first_part, used = (merges[number + 1, place] for place in range(3))

            def some_parts(number: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                places = [number * at_once + offset for offset in range(at_once)]
                found = [
                    [load(first_part + jnp.minimum(place, used - 1), first_head + head) for head in range(heads)]
                    for place in places
                ]
                states = [State(*totals[3 * head : 3 * head + 3]) for head in range(heads)]
                for place, read in zip(places, found, strict=True):
                    exists = everywhere(place, jnp.int32) < used
                    for head in range(heads):
                        merged = softmax.merge(states[head], read[head])
                        pairs = zip(merged, states[head], strict=True)
                        states[head] = State(*(jnp.where(exists, new, old) for new, old in pairs))
                return tuple(value for state in states for value in state)

            nothing = (everywhere(-jnp.inf), everywhere(0.0), everywhere(0.0)) * heads
            totals = lax.fori_loop(0, lax.div(used - 1, jnp.int32(at_once)) + 1, some_parts, nothing)
            for head in range(heads):
                out_smem[pl.ds(head * E, E)] = softmax.finish(*totals[3 * head + 1 : 3 * head + 3])
            plgpu.commit_smem()
            for head in range(heads):
                row = out_C.at[pl.ds((token * H + first_head + head) * D, D)]
                plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(head * E, D)], row)
            plgpu.wait_smem_to_gmem(0)
            return number + blocks

        count = merges[0, 0]
        lax.while_loop(lambda number: number < count, one_token, lax.axis_index("block"))

    return chained_kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((T * H * D,), jnp.bfloat16),),
        grid=(H // heads, blocks),
        grid_names=("heads", "block"),
        kernel_name="isojax_attention_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=(plgpu.SMEM((heads * E,), jnp.bfloat16),),
    )
