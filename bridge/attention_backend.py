"""Paged attention inside vLLM: the layer that owns a cache, a step's metadata, the one op that writes and reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from bridge.arrays import shared_views
from bridge.buckets import bucket_of
from bridge.vllm_api import PagedCacheLayout, cache_pages, full_attention_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from isojax.policy import PolicyConfig

# T: tokens of the padded step, R: requests, P: pages a request, H: query heads, K: key heads, D: head dimension.

PREFIX = "model.layers.{layer}.self_attn.attn"
"""vLLM finds a layer's index in its name."""


class IsojaxAttentionBackend(PagedCacheLayout, AttentionBackend):
    """The policy's attention region over vLLM's paged cache. Any page size and head size; causal only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    # The op writes the cache itself, so that one op writes and reads it.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The registry's slot for backends from outside of vLLM."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CachedAttention]:
        """What a layer runs."""
        return CachedAttention

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        """What makes a step's metadata."""
        return StepMetadataBuilder


@dataclass(frozen=True)
class StepMetadata(AttentionMetadata):
    """Where the tokens of one step live. Made once a step, used by every layer.

    num_tokens: real tokens; rows beyond them pad to the bucket T and are inert. slots: int64 [num_tokens], each token's
    row in the cache seen as rows of [K, D] from the first key page on. page_table_RP: int32, a request's key pages.
    request_of_token_T: int32, -1 on padding rows, which are dead. decode: no request has more than one new token.
    """

    num_tokens: int
    slots: torch.Tensor
    page_table_RP: torch.Tensor
    request_of_token_T: torch.Tensor
    decode: bool


class StepMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Turns vLLM's batch description into the operands of the paged attention region."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        """Signature set by vLLM."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        # All requests that can run at once: one shape, so one compiled attention a token bucket.
        self._requests = vllm_config.scheduler_config.max_num_seqs
        self._page_table_RP: torch.Tensor | None = None
        self._request_of_token: dict[int, torch.Tensor] = {}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        """The metadata of a step. `common_prefix_len` is a hint for cascade attention, which would change the sums.

        Its tensors are the builder's own, overwritten by the next step. Filled through NumPy: these are a few hundred
        numbers, and a torch op on them would wait for a second thread.
        """
        common = common_attn_metadata
        requests, tokens = common.num_reqs, common.num_actual_tokens
        if self._page_table_RP is None:
            self._page_table_RP = _kept_int32(self._requests, common.block_table_tensor.shape[1])
        np.multiply(common.block_table_tensor[:requests].numpy(), 2, out=self._page_table_RP[:requests].numpy())
        slots = common.slot_mapping[:tokens].numpy().astype(np.int64)
        lengths = np.diff(common.query_start_loc_cpu[: requests + 1].numpy())
        bucket = bucket_of(tokens)
        if bucket not in self._request_of_token:
            self._request_of_token[bucket] = _kept_int32(bucket)
        request_of_token_T = self._request_of_token[bucket].numpy()
        request_of_token_T[:tokens] = np.repeat(np.arange(requests, dtype=np.int32), lengths)
        request_of_token_T[tokens:] = -1
        return StepMetadata(
            num_tokens=tokens,
            # A block is a page of keys followed by one of values: skip the values of the blocks before.
            slots=torch.from_numpy(slots + slots // self.block_size * self.block_size),
            page_table_RP=self._page_table_RP,
            request_of_token_T=self._request_of_token[bucket],
            decode=common.max_query_len == 1,
        )


def _kept_int32(*shape: int) -> torch.Tensor:
    """Zeros that JAX sees in place, so that no layer converts them again."""
    tensor = torch.zeros(shape, dtype=torch.int32)
    shared_views.add([tensor])
    return tensor


class CachedAttention(AttentionImpl):
    """Writes a step's keys and values into one layer's cache, then attends over it: one call, nothing in between."""

    def __init__(self, scale: float, split: int) -> None:
        """scale: of the scores. split: keys a split of the online softmax, as in the contract."""
        self.scale = scale
        self.split = split
        self._key_pages: torch.Tensor | None = None
        self._value_pages: torch.Tensor | None = None

    def bind(self, pages: torch.Tensor) -> None:
        """Takes a layer's cache as `vllm_api.cache_pages` shows it, in place of any earlier one."""
        self.release()
        # As integers: torch copies bf16 rows element by element, and JAX would convert a bf16 view.
        raw = pages.view(torch.int16) if pages.dtype == torch.bfloat16 else pages
        # Seen from one page on, the values of block b are found under the same page number as its keys.
        self._key_pages, self._value_pages = raw[:-1], raw[1:]
        shared_views.add([self._key_pages, self._value_pages])

    def release(self) -> None:
        """Lets go of the cache, so that vLLM can free it."""
        if self._key_pages is not None and self._value_pages is not None:
            shared_views.discard([self._key_pages, self._value_pages])
        self._key_pages = self._value_pages = None

    def forward(  # type: ignore[override]
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor | None = None,
        *args: Any,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of the step's queries. query: [T, H, D]; key, value: [T, K, D]; positions: int32 [T]. -> [T, H, D]

        While vLLM profiles there is no metadata and no cache; the result is then zeros of the right shape.
        """
        if attn_metadata is None:
            return torch.zeros(query.shape, dtype=query.dtype)
        keys, values = self._key_pages, self._value_pages
        if keys is None or values is None:
            raise RuntimeError("attention before the KV cache was bound")
        step = attn_metadata
        for pages, rows in ((keys, key), (values, value)):
            new = rows[: step.num_tokens]
            new = new.view(torch.int16) if new.dtype == torch.bfloat16 else new
            pages.view(-1, *pages.shape[2:]).index_copy_(0, step.slots, new)
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


class CachedAttentionLayer(nn.Module, AttentionLayerBase):
    """One layer's place in vLLM: it has a name, asks for a cache and is given one."""

    impl: Any

    def __init__(
        self,
        vllm_config: VllmConfig,
        layer: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        scale: float,
        split: int,
        backend: type[IsojaxAttentionBackend],
    ) -> None:
        """Registers itself with vLLM under the layer's name. dtype: of the cache, the policy's own."""
        super().__init__()
        self.layer_name = PREFIX.format(layer=layer)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.dtype = dtype
        self.block_size = vllm_config.cache_config.block_size
        self._backend = backend
        self.impl = backend.get_impl_cls()(scale, split)
        self._kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[self.layer_name] = self

    @property
    def kv_cache(self) -> torch.Tensor:
        """The cache as vLLM allocated it."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: torch.Tensor) -> None:
        # vLLM assigns this attribute (0.26) or does so through bind_kv_cache (0.32); an empty one when it shuts down.
        self._kv_cache = kv_cache
        if kv_cache.numel():
            self.impl.bind(cache_pages(kv_cache, self.block_size, self.num_kv_heads, self.head_size))
        else:
            self.impl.release()

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Given here, because vLLM's platforms would choose their own kernels for any name."""
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A full causal cache in the policy's dtype."""
        self.block_size = vllm_config.cache_config.block_size
        return full_attention_spec(self.block_size, self.num_kv_heads, self.head_size, self.dtype)


def cached_attention_layers(
    vllm_config: VllmConfig,
    config: PolicyConfig,
    dtype: torch.dtype,
    backend: type[IsojaxAttentionBackend] = IsojaxAttentionBackend,
) -> nn.ModuleList:
    """One layer of the cache for each of the policy's. dtype: of the cache, the policy's own."""
    return nn.ModuleList(
        CachedAttentionLayer(
            vllm_config,
            layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_dim,
            dtype=dtype,
            scale=config.softmax_scale,
            split=config.attention_split,
            backend=backend,
        )
        for layer in range(config.num_layers)
    )


def step_metadata() -> Any:
    """The running step's metadata, the same for every layer; None while vLLM profiles."""
    metadata: Any = get_forward_context().attn_metadata
    return next(iter(metadata.values())) if isinstance(metadata, dict) else metadata


def cached_layer(layer: int) -> CachedAttentionLayer:
    """The running engine's layer of this index."""
    return get_forward_context().no_compile_layers[PREFIX.format(layer=layer)]


_library = torch.library.Library("isojax", "FRAGMENT")
_library.define("cached_attention(Tensor q, Tensor k, Tensor v, Tensor positions, int layer) -> Tensor")


def _cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, layer: int
) -> torch.Tensor:
    owner = cached_layer(layer)
    return owner.impl.forward(owner, q, k, v, owner.kv_cache, step_metadata(), positions=positions)


for _device in ("CPU", "CUDA"):
    _library.impl("cached_attention", _cached_attention, _device)
torch.library.register_fake(
    "isojax::cached_attention", lambda q, k, v, positions, layer: torch.empty_like(q), lib=_library
)
