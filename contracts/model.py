"""Contract section `model`: which logical model this is."""

from typing import Annotated

from contracts.field_types import Count, Positive, Sha256, Text
from contracts.section import MODEL, TEXT, Section


class ModelSection(Section):
    """The logical model: what it computes in exact arithmetic, and which text its tokens stand for."""

    family: Annotated[Text, MODEL]
    """Family of the policy, such as `llama` or `qwen3`."""
    architecture: Annotated[Text, MODEL]
    """Class name in the checkpoint's config.json, such as `LlamaForCausalLM`."""
    config_digest: Annotated[Sha256, MODEL]
    """SHA-256 over the canonical bytes of every config field that affects numerics."""
    tokenizer_digest: Annotated[Sha256, TEXT]
    """SHA-256 over the tokenizer's files, chat template included."""
    num_layers: Annotated[Positive, MODEL]
    """Transformer layers."""
    hidden_size: Annotated[Positive, MODEL]
    """Width of the residual stream."""
    intermediate_size: Annotated[Positive, MODEL]
    """Width between gate_up and down."""
    num_heads: Annotated[Positive, MODEL]
    """Query heads."""
    num_kv_heads: Annotated[Positive, MODEL]
    """Key and value heads; divides `num_heads`."""
    head_dim: Annotated[Positive, MODEL]
    """Width of one head."""
    num_experts: Annotated[Count, MODEL]
    """Experts of a mixture; 0 for a dense model."""
    vocab_size: Annotated[Positive, MODEL]
    """Tokens that can be sampled, without padding."""
    max_position: Annotated[Positive, MODEL]
    """Longest context in tokens, and the rows of the RoPE table."""
