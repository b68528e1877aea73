"""What the log-probability regions compute, how they round and what can go wrong."""

from pallas_kernels.matmul.spec import CHAIN, COLUMN_TILE
from pallas_kernels.region import Spec
from pallas_kernels.rounding import LANES

LEAVES = 8
BLOCK = 512
# Rows of one tile of logits. They are neutral for the bits, as in the matmul.
ROW_TILES = (8, 16, 64)

_ROUNDING = (
    "logits are one fp32 leaf of the matmul, never rounded",
    "logits / temperature in fp32, a true division",
    "the maximum of the row; exp(x - maximum) in fp32",
    "the vocabulary is cut into 8 leaves of whole blocks of 512, the same for any padding; a leaf sums on its own:",
    "64 lanes in ascending order, then halves",
    "leaves fold as the binary tree ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))",
    "(x - maximum) - log(sum)",
)
_CONSTANTS: dict[str, int | float | str] = {
    "vocabulary_leaves": LEAVES,
    "vocabulary_block": BLOCK,
    "cpu_lanes": LANES,
    "cpu_row_tiles": str(ROW_TILES),
    "cpu_column_tile": COLUMN_TILE,
    "cpu_chain": CHAIN,
    "cpu_exp": "xla:cpu",
    "cpu_log": "xla:cpu",
}
_HAZARDS = (
    "temperature applied to log-probabilities",
    "division by a constant turned into a product",
    "leaves that depend on the padded vocabulary",
    "NaN or +infinity in a row: the whole row becomes NaN, none is hidden",
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
