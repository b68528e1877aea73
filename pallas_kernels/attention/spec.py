"""What the two attention regions compute, how they round and what can go wrong."""

from pallas_kernels.region import Spec

QUERY_TILE = 4
BLOCK = 128

_CONSTANTS = {"cpu_query_tile": QUERY_TILE, "cpu_block": BLOCK, "cpu_sum_order": "xla:cpu"}
_ROUNDING = (
    "scores, weights and sums are fp32; a score is the dot times scale",
    "blocks of keys are aligned at absolute position 0; splits have `split` keys",
    "online softmax inside a split; a split starts from its own first block",
    "the first split initialises, later ones merge in ascending order; never a lazy rescale",
    "weights are rounded to the operand's dtype for the product with V, their sum uses the unrounded ones",
    "one division by the sum and one round at the end",
)
_HAZARDS = (
    "0 x NaN from values behind a row's length: keys and values there are zeroed",
    "a fully masked block that moves a bit: every update is selected a row",
    "a query tile, split count or block chosen by the batch",
    "page size",
)

SPEC = Spec(
    version="1",
    operations=("causal softmax(q k^T * scale) v inside each packed segment",),
    rounding=_ROUNDING,
    constants=_CONSTANTS,
    hazards=_HAZARDS,
    cases=("trainer_fwd", "trainer_score"),
)
PAGED_SPEC = Spec(
    version="1",
    operations=("causal softmax(q k^T * scale) v over each request's pages",),
    rounding=_ROUNDING,
    constants=_CONSTANTS,
    hazards=_HAZARDS,
    cases=("engine_prefill", "engine_decode"),
)
