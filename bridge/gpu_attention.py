"""Paged attention inside vLLM on a card: metadata stays on the device, one op writes the cache and reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from bridge.attention_backend import IsojaxAttentionBackend
from bridge.step_inputs import BatchTensors, StepOperands

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

# T: tokens of the padded step, H: query heads, K: key heads, D: head dimension.


class GpuAttentionBackend(IsojaxAttentionBackend):
    """The policy's attention region over vLLM's paged cache on a card, in full CUDA graphs too; causal only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

    @staticmethod
    def get_impl_cls() -> type[GpuCachedAttention]:  # type: ignore[override]
        """What a layer runs."""
        return GpuCachedAttention

    @staticmethod
    def get_builder_cls() -> type[GpuMetadataBuilder]:  # type: ignore[override]
        """What makes a step's metadata."""
        return GpuMetadataBuilder


@dataclass
class GpuStepMetadata(AttentionMetadata):
    """vLLM's tensors of one step, and what the model made of them at its entry, for every layer.

    decode: whether no request has more than one new token.
    """

    batch: BatchTensors
    decode: bool
    operands: StepOperands | None = None


class GpuMetadataBuilder(AttentionMetadataBuilder[GpuStepMetadata]):
    """Passes vLLM's device tensors on: nothing is computed on the host, nothing waits for the device.

    vLLM's V2 runner fills the same tensors at every step, so a graph that was captured with them finds the next step's
    values. What is derived from them is derived inside the graph (`StepInputs`).
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Signature set by vLLM."""
        super().__init__(cast("Any", kv_cache_spec), layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GpuStepMetadata:
        """The metadata of a step. `common_prefix_len` is a hint for cascade attention, which would change the sums."""
        common = common_attn_metadata
        batch = BatchTensors(
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
        )
        return GpuStepMetadata(batch, decode=common.max_query_len == 1)


class GpuCachedAttention(AttentionImpl):
    """Writes a step's keys and values into one layer's cache, then attends over it: one call, nothing in between."""

    def __init__(self, scale: float, split: int) -> None:
        """scale: of the scores. split: keys a split of the online softmax, as in the contract."""
        self.scale = scale
        self.split = split
        self._key_pages: torch.Tensor | None = None
        self._value_pages: torch.Tensor | None = None

    def bind(self, pages: torch.Tensor) -> None:
        """Takes a layer's cache as `vllm_api.cache_pages` shows it, in place of any earlier one."""
        # Seen from one page on, the values of block b are found under the same page number as its keys.
        self._key_pages, self._value_pages = pages[:-1], pages[1:]

    def release(self) -> None:
        """Lets go of the cache, so that vLLM can free it."""
        self._key_pages = self._value_pages = None

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GpuStepMetadata | None,
        output: torch.Tensor | None = None,
        *args: Any,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of the step's queries. query: [T, H, D]; key, value: [T, K, D]; positions: int32 [T]. -> [T, H, D]

        While vLLM profiles there is no metadata and no cache; the result is then zeros of the right shape.
        """
        if attn_metadata is None:
            return torch.zeros_like(query)
        keys, values, step = self._key_pages, self._value_pages, attn_metadata.operands
        if keys is None or values is None or step is None:
            raise RuntimeError("attention before the KV cache was bound, or outside of the model's forward")
        for pages, rows in ((keys, key), (values, value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, step.slots_N, rows[: step.slots_N.shape[0]])
        return torch.ops.isojax.paged_attention(
            query,
            keys,
            values,
            step.page_table_RP,
            step.request_of_token_T,
            positions,
            scale=self.scale,
            split=self.split,
        )
