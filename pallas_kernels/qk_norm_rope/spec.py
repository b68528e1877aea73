"""What the QK-norm and RoPE region computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec
from pallas_kernels.rounding import LANES

SPEC = Spec(
    version="1",
    operations=(
        "q, k = RMSNorm over the head dimension, where norm weights are given",
        "first half: a * cos - b * sin; second half: b * cos + a * sin (Hugging Face rotate_half)",
    ),
    rounding=(
        "the norm rounds as rms_norm does, before the rotation",
        "the rotation is fp32, each product and sum rounded on its own; one round to the operand's dtype",
    ),
    constants={"cpu_row_tile": ROW_TILE, "cpu_lanes": LANES},
    hazards=("a bf16 table of cosines", "a product fused into the sum", "interleaved pairs instead of halves"),
)
