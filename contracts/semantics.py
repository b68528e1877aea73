"""Contract section `semantics`: what a log-probability means, in which dtypes it is computed and how it is sampled."""

import math
from typing import Annotated, Literal

from pydantic import AfterValidator

from contracts.field_types import Dtype, Positive, Sha256, Text
from contracts.float_bits import FloatBits, bits_float
from contracts.section import BITS, Section


def _temperature(bits: str) -> str:
    value = bits_float(bits)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"the temperature is {value}; it must be finite and above 0")
    return bits


class Semantics(Section):
    """Everything about a log-probability that is not a region's own."""

    temperature: Annotated[FloatBits, AfterValidator(_temperature), BITS]
    """The one T of log_softmax(logits / T), on both sides."""
    sampling_filters: Annotated[Literal["none"], BITS]
    """The policy's value is that of the unfiltered distribution; top-k, top-p and min-p are refused."""
    sampling_rng: Annotated[Text, BITS]
    """Name of the generator that picks tokens, such as `splitmix64_inverse_cdf`."""
    nan_policy: Annotated[Literal["refuse"], BITS]
    """A NaN or infinite logit is an error that names request, position and region."""
    padded_vocab_size: Annotated[Positive, BITS]
    """Rows of the head with padding, at least `model.vocab_size`."""
    padding_logit: Annotated[Literal["-inf"], BITS]
    """Logit of the padded rows, on both sides."""
    vocabulary_leaves: Annotated[Positive, BITS]
    """Leaves of the log-softmax tree; tp must divide it, so that all ranks hold equal tiles."""
    split_k_leaves: Annotated[Positive, BITS]
    """Leaves of matmuls whose K is split over ranks; tp must divide it."""
    rope_table_digest: Annotated[Sha256, BITS]
    """SHA-256 over the fp32 RoPE table that ships with the policy."""
    parameter_dtype: Annotated[Dtype, BITS]
    """Dtype of the weights that the weight digest covers."""
    compute_dtype: Annotated[Dtype, BITS]
    """Dtype of activations between regions."""
    kv_cache_dtype: Annotated[Dtype, BITS]
    """Dtype of cached keys and values; the trainer's keys and values are rounded alike."""
    head_operand_dtype: Annotated[Dtype, BITS]
    """Dtype of the hidden states and weights that enter the head's matmul."""
    head_output_dtype: Annotated[Dtype, BITS]
    """Dtype of logits and log-probabilities."""
    quantization: Annotated[Literal["none"], BITS]
    """Quantisation of weights or activations."""
    adapters: Annotated[Literal["none", "merged", "unmerged"], BITS]
    """LoRA adapters: absent, merged into the weights, or run beside them. Merging rounds."""
