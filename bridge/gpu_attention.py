"""Paged attention inside vLLM on a card: metadata stays on the device, one op writes the cache, one reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from bridge.attention_backend import IsojaxAttentionBackend, cached_layer, step_metadata
from bridge.step_inputs import BatchTensors, StepOperands

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

# T: tokens of the padded step, H: query heads, K: key heads, D: head dimension.

_captures_decode: ContextVar[bool] = ContextVar("captures_decode", default=False)


@contextmanager
def capturing(*, decode: bool) -> Iterator[None]:
    """Metadata that is built inside for a graph's capture says decode or not, whatever vLLM's dummy batch looks like.

    Elsewhere it says that the graph is not of decode steps, since it may be replayed for any.
    """
    token = _captures_decode.set(decode)
    try:
        yield
    finally:
        _captures_decode.reset(token)


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

    decode: whether no request has more than one new token, in this step or in any that a graph is replayed for.
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

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> GpuStepMetadata:
        """The metadata of a graph, see `capturing`."""
        return replace(self.build(0, common_attn_metadata), decode=_captures_decode.get())


class GpuCachedAttention(AttentionImpl):
    """Puts a step's rotated keys and values into one layer's cache, then attends over it; see `bridge.graphs`."""

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

    def write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        **parameters: Any,
    ) -> torch.Tensor:
        """Queries of the step's projection, after norm and rotation; its keys and values are then in the cache.

        qkv: [T, (H + 2K) * D]; cos_sin: fp32 [T, D]; norms: [D]; parameters: of the region. -> [T, H, D]. While vLLM
        profiles there is no cache; the result is then zeros of the right shape.
        """
        found = self._pages_and_step()
        if found is None:
            tokens, head = cos_sin.shape
            return qkv.new_zeros(tokens, qkv.shape[1] // head - 2 * parameters["key_heads"], head)
        keys, values, step, _ = found
        return torch.ops.isojax.paged_qk_norm_rope(
            qkv, cos_sin, step.slots_T, keys, values, q_norm, k_norm, **parameters
        )

    def attend(self, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attention of the step's queries. query: [T, H, D]; positions: int32 [T]. -> [T, H, D], zeros in profiling."""
        found = self._pages_and_step()
        if found is None:
            return torch.zeros_like(query)
        keys, values, step, decode = found
        ops = torch.ops.isojax
        # The queries are what the launch before wrote; positions and requests are from the step's start, layers ago.
        return (ops.paged_decode_attention if decode else ops.paged_attention)(
            query,
            keys,
            values,
            step.page_table_RP,
            step.request_of_token_T,
            positions,
            scale=self.scale,
            split=self.split,
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """vLLM's own entry, which nothing calls: the graph calls `write` and `attend`."""
        raise NotImplementedError("the policy's graph calls write and attend; vLLM's attention layers are not used")

    def _pages_and_step(self) -> tuple[torch.Tensor, torch.Tensor, StepOperands, bool] | None:
        metadata: GpuStepMetadata | None = step_metadata()
        if metadata is None:
            return None
        if self._key_pages is None or self._value_pages is None or metadata.operands is None:
            raise RuntimeError("attention before the KV cache was bound, or outside of the model's forward")
        return self._key_pages, self._value_pages, metadata.operands, metadata.decode


def _write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    layer: int,
    key_heads: int,
    eps: float,
) -> torch.Tensor:
    return cached_layer(layer).impl.write(qkv, cos_sin, q_norm, k_norm, key_heads=key_heads, eps=eps)


def _attend(q: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
    return cached_layer(layer).impl.attend(q, positions)


_library = torch.library.Library("isojax", "FRAGMENT")
_library.define(
    "write_cache(Tensor qkv, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, int layer, int key_heads, float eps)"
    " -> Tensor"
)
_library.define("attend_cache(Tensor q, Tensor positions, int layer) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("write_cache", _write, _device)
    _library.impl("attend_cache", _attend, _device)
