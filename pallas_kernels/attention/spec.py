"""What the two attention regions compute, how they round and what can go wrong."""

from pallas_kernels.region import Spec
from pallas_kernels.rounding import LANES

# Queries that share the reading of keys. Neutral for the bits, as the matmul's row tiles are: in the paged form a
# lone query, as in decoding, takes a tile of its own.
QUERY_TILE = 32
# Up to so many tokens every query is taken alone.
FEW_TOKENS = 16
BLOCK = 128
# Keys of a split where nobody chose. Each split costs prefill a merge, and gives decode work for one block more.
DEFAULT_SPLIT = 1024

_CONSTANTS: dict[str, int | float | str] = {
    "cpu_query_tile": QUERY_TILE,
    "cpu_block": BLOCK,
    "cpu_lanes": LANES,
    "cpu_exp": "xla:cpu",
}
_ROUNDING = (
    "a score is a fused multiply-add chain over the head dimension, then a product with scale",
    "weights, sums and products are fp32, each rounded on its own; on a card a product may be fused into the sum that "
    "takes it, as the sealed module and the contract's compiler do",
    "blocks of 128 keys are aligned at absolute position 0; splits have `split` keys",
    "online softmax inside a split; a split starts from its own first block",
    "the first split initialises, later ones merge in ascending order; never a lazy rescale",
    "the weights of a block sum before they are rounded: on a CPU in 64 lanes, then in halves, on a card in the order "
    "of the sealed module's reduction",
    "weights are rounded to the operand's dtype for the product with V, a fused multiply-add chain over the block",
    "one division by the sum and one round at the end",
)
_HAZARDS = (
    "0 x NaN from values behind a row's length: keys and values there are zeroed",
    "a fully masked block that moves a bit: every update is selected a row",
    "a query tile, split count or block chosen by the batch that moves a bit",
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
DECODE_SPEC = Spec(
    version="1",
    operations=("causal softmax(q k^T * scale) v over each request's pages, where every request has one token",),
    rounding=_ROUNDING,
    constants=_CONSTANTS,
    hazards=(
        *_HAZARDS,
        "a request with several tokens: on a card its rows are NaN",
        "on a card positions and requests are read while the launch before runs, so it must not be what writes them",
    ),
    cases=("engine_decode",),
)
