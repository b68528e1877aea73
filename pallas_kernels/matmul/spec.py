"""What the matmul region computes, how it rounds and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.region import Spec

COLUMN_TILE = 64

SPEC = Spec(
    version="1",
    operations=("y[t, n] = sum over k of x[t, k] * w[n, k]", "y[t, n] + bias[n], where a bias is given"),
    rounding=(
        "operands are exact in fp32, products and sums are fp32",
        "K is cut into `leaves` contiguous leaves, each summed from zero",
        "leaves fold in fp32 as the binary tree ((l0 + l1) + (l2 + l3)) + ..., lower index on the left",
        "one round to the output dtype at the root",
        "then the bias: fp32 sum of the rounded value and the bias, rounded once more",
    ),
    constants={"cpu_row_tile": ROW_TILE, "cpu_column_tile": COLUMN_TILE, "cpu_leaf_order": "xla:cpu"},
    hazards=(
        "a tile chosen by the number of rows",
        "a bf16 dot, which XLA:CPU sums in another order than a dot of the widened operands",
        "fusion of the bias or of a neighbour with the root",
    ),
)
