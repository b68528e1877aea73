"""What the two RMSNorm regions compute, how they round and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec
from pallas_kernels.rounding import LANES

_ROUNDING = (
    "squares, their sum, the mean, + eps, square root and reciprocal are fp32, each rounded on its own",
    "the sum runs in 64 lanes in ascending order, then in halves",
    "x times the reciprocal root is rounded to the dtype of x, then the product with the weight once more",
)
_HAZARDS = (
    "rows per block chosen by the number of rows",
    "an approximate rsqrt, or a fused multiply-add, in place of the separate operations",
    "bf16 rounding by truncation",
)

SPEC = Spec(
    version="1",
    operations=("y = round(x / sqrt(mean(x^2) + eps)) * w",),
    rounding=_ROUNDING,
    constants={"cpu_row_tile": ROW_TILE, "cpu_lanes": LANES},
    hazards=_HAZARDS,
)

ADD_SPEC = Spec(
    version="1",
    operations=("s = x + residual", "y = round(s / sqrt(mean(s^2) + eps)) * w"),
    rounding=("the sum is rounded once to the dtype of x, before the squares", *_ROUNDING),
    constants={"cpu_row_tile": ROW_TILE, "cpu_lanes": LANES},
    hazards=(*_HAZARDS, "the variance of the unrounded sum"),
)
