"""What the QK-norm and RoPE region computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec
from pallas_kernels.rounding import LANES

_OPERATIONS = (
    "qkv is cut into query heads, key heads and value heads, in this order; v keeps its bits",
    "q, k = RMSNorm over the head dimension, where norm weights are given",
    "first half: a * cos - b * sin; second half: b * cos + a * sin (Hugging Face rotate_half)",
)
_ROUNDING = (
    "the norm rounds as rms_norm does, before the rotation",
    "the rotation is fp32, each product and sum rounded on its own; one round to the operand's dtype",
)
_CONSTANTS: dict[str, int | float | str] = {"cpu_row_tile": ROW_TILE, "cpu_lanes": LANES}
_HAZARDS = ("a bf16 table of cosines", "a product fused into the sum", "interleaved pairs instead of halves")

SPEC = Spec("1", _OPERATIONS, _ROUNDING, _CONSTANTS, _HAZARDS)
PAGED_SPEC = Spec(
    "1",
    (*_OPERATIONS, "k and v go to each token's row of the cache; nothing else of it changes"),
    _ROUNDING,
    _CONSTANTS,
    (*_HAZARDS, "a padding token that writes into somebody's page", "row numbers that overflow 32 bits"),
    cases=("engine_prefill", "engine_decode"),
)
