"""What the SwiGLU region computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec

SPEC = Spec(
    version="1",
    operations=("gate, up = halves of the row", "y = round(gate / (1 + exp(-gate))) * up"),
    rounding=(
        "silu is fp32 inside: negate, exp, + 1, divide; rounded once",
        "the product with up is fp32, rounded once",
    ),
    constants={"cpu_row_tile": ROW_TILE, "cpu_exp": "xla:cpu"},
    hazards=("x * sigmoid(x) in place of x / (1 + exp(-x))", "the skipped round between silu and the product"),
)
