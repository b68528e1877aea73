"""What the cast region computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec

SPEC = Spec(
    version="1",
    operations=("y = x in another float dtype",),
    rounding=("to nearest, ties to even; subnormals, signed zeros, infinities and NaN are kept",),
    constants={"cpu_row_tile": ROW_TILE},
    hazards=("truncation", "flushed subnormals", "a pair of casts that the compiler removes"),
)
