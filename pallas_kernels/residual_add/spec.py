"""What the residual add computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec

SPEC = Spec(
    version="1",
    operations=("s = x + residual",),
    rounding=("fp32 sum, rounded once to the dtype of x",),
    constants={"cpu_row_tile": ROW_TILE},
    hazards=("fusion with the projection before it, which skips a round",),
)
