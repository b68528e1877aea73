"""What a running engine says about itself: read from the live engine, never copied from the contract."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

from contracts.contract import ExecutionContract
from contracts.field_types import Positive, Sha256Set, Text
from contracts.float_bits import FloatBits
from contracts.frozen_map import FrozenMap
from contracts.toolchain import Toolchain

# Case to registered region primitive to the digests of the kernels that were compiled for it there.
KernelRecord = FrozenMap[FrozenMap[Sha256Set]]


class EngineReport(BaseModel):
    """The engine's side of the handshake. Dtypes and settings are free text, so that a wrong one can be reported."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    contract: ExecutionContract
    """The contract that the engine loaded."""
    mesh: FrozenMap[Positive]
    """Degree by axis, from the engine's parallel config; a missing axis has degree 1."""
    device_kind: Text
    """Kind of the devices that it runs on, as JAX names them."""
    toolchain: Toolchain
    """What is installed there, and the model runner in use."""
    temperature: FloatBits
    """T of the region that computes log-probabilities."""
    tokenizer_digest: Text
    """Of the tokenizer that the engine loaded."""
    rope_table_digest: Text
    """Of the table that the engine loaded."""
    padded_vocab_size: Positive
    """Rows of the head that it holds, over all ranks."""
    parameter_dtype: Text
    """Dtype of the weights that it serves."""
    compute_dtype: Text
    """Dtype of its activations, from the engine's model config."""
    kv_cache_dtype: Text
    """Dtype of its cache, resolved (never `auto`)."""
    head_operand_dtype: Text
    """Dtype of hidden states and weights that enter the head."""
    head_output_dtype: Text
    """Dtype of its logits and log-probabilities."""
    quantization: Text
    """`none`, or the engine's quantisation method."""
    adapters: Text
    """`none`, `merged` or `unmerged`."""
    weight_digest: Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{16}$")] | None
    """Of the weights that it holds; None before the first sync."""
    installed: KernelRecord
    """Kernels that were compiled, by case and region primitive; empty where the engine has not compiled yet."""
    served: KernelRecord
    """Kernels that really ran, by case and region primitive; a case that has not run yet is absent."""
