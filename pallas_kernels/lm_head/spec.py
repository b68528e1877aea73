"""What the log-probability regions compute, how they round and what can go wrong."""

from pallas_kernels.loops import ROW_TILE
from pallas_kernels.matmul.spec import COLUMN_TILE
from pallas_kernels.region import Spec

LEAVES = 8
BLOCK = 128

_ROUNDING = (
    "logits are one fp32 leaf of the matmul, never rounded",
    "logits / temperature in fp32, a true division",
    "the maximum of the row; exp(x - maximum) in fp32",
    "the vocabulary is cut into 8 leaves of whole blocks of 128, the same for any padding; a leaf sums on its own",
    "leaves fold as the binary tree ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))",
    "(x - maximum) - log(sum)",
)
_CONSTANTS = {
    "vocabulary_leaves": LEAVES,
    "vocabulary_block": BLOCK,
    "cpu_row_tile": ROW_TILE,
    "cpu_column_tile": COLUMN_TILE,
    "cpu_sum_order": "xla:cpu",
}
_HAZARDS = (
    "temperature applied to log-probabilities",
    "division by a constant turned into a product",
    "leaves that depend on the padded vocabulary",
    "NaN or infinity in a row: the whole row becomes NaN, none is hidden",
)

ROWS_SPEC = Spec(
    version="1",
    operations=("log_softmax(x w^T / temperature) over the whole vocabulary",),
    rounding=_ROUNDING,
    constants=_CONSTANTS,
    hazards=_HAZARDS,
)
TOKEN_SPEC = Spec(
    version="1",
    operations=("log_softmax(x w^T / temperature) at one target a row",),
    rounding=_ROUNDING,
    constants=_CONSTANTS,
    hazards=_HAZARDS,
    cases=("trainer_fwd", "trainer_score"),
)
