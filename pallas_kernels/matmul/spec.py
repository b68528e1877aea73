"""What the matmul region computes, how it rounds and what can go wrong."""

from pallas_kernels.region import Spec

# Rows of one dot, the smallest that holds all rows or else the largest. They are neutral: a dot of any of these row
# counts over a multiple of 64 columns is one fused multiply-add chain along K for every element.
ROW_TILES = (8, 16, 64, 256)
# XLA:CPU runs a dot as such a chain when the columns are a multiple of this; other widths take other kernels.
COLUMN_TILE = 64
# The chain starts again from zero after so many steps, and the pieces are added in ascending order.
CHAIN = 512

SPEC = Spec(
    version="1",
    operations=("y[t, n] = sum over k of x[t, k] * w[n, k]", "y[t, n] + bias[n], where a bias is given"),
    rounding=(
        "operands are exact in fp32",
        "K is cut into `leaves` contiguous leaves, each summed from zero",
        "in a leaf, fp32 fused multiply-adds in ascending k from zero, in pieces of 512",
        "the pieces of a leaf are added in ascending order",
        "leaves fold in fp32 as the binary tree ((l0 + l1) + (l2 + l3)) + ..., lower index on the left",
        "one round to the output dtype at the root",
        "then the bias: fp32 sum of the rounded value and the bias, rounded once more",
        "subnormal operands and results count as zero",
    ),
    constants={"cpu_row_tiles": str(ROW_TILES), "cpu_column_tile": COLUMN_TILE, "cpu_chain": CHAIN},
    hazards=(
        "a dot whose order along K depends on its rows or columns (one row, or columns that are no multiple of 64)",
        "a bf16 dot, which sums in another order than a dot of the widened operands",
        "fusion of the bias, of the fold or of a neighbour with the dot",
    ),
)
