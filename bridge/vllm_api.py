"""Where vLLM 0.26 and 0.32 differ for us: cache layout, weight versions, a CPU worker's class name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm import LLM


class PagedCacheLayout:
    """Mixed into the attention backend: a block holds its keys, then its values, each [block size, kv heads, head dim].

    0.26 asks for the shape itself; 0.32 asks for a physical layout and hands over [blocks, kv heads, block size,
    2 x head dim] per layer. Either way a block is one contiguous run of bytes, whose inner order is the backend's own.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """vLLM 0.26."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """vLLM 0.26: physical order equals logical order."""
        return tuple(range(6 if include_num_layers_dimension else 5))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """vLLM 0.32: layers apart, blocks compact."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)


def cache_pages(kv_cache: torch.Tensor, block_size: int, num_kv_heads: int, head_size: int) -> torch.Tensor:
    """One layer's cache as pages [2 x blocks, block size, kv heads, head dim]: block b is pages 2b (keys) and 2b + 1.

    Raises ValueError if vLLM allocated something else, which would mean reading other blocks' bytes.
    """
    elements_a_block = 2 * block_size * num_kv_heads * head_size
    if not kv_cache.is_contiguous() or kv_cache.numel() != kv_cache.shape[0] * elements_a_block:
        raise ValueError(
            f"KV cache of shape {tuple(kv_cache.shape)}, strides {kv_cache.stride()}: expected compact blocks of "
            f"{elements_a_block} elements (2 x {block_size} tokens x {num_kv_heads} heads x {head_size})"
        )
    return kv_cache.view(2 * kv_cache.shape[0], block_size, num_kv_heads, head_size)


def full_attention_spec(block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> FullAttentionSpec:
    """The cache that one layer needs, in vLLM's terms."""
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)


def finish_weight_update(llm: LLM, digest: str) -> None:
    """Ends a weight update; 0.32 also stamps every later output with the weights' digest as its weight version."""
    if hasattr(llm, "get_weight_version"):
        llm.finish_weight_update(weight_version=digest)
    else:
        llm.finish_weight_update()


def weight_version(llm: LLM) -> str | None:
    """The version that vLLM itself holds for the current weights, None before 0.32 had one."""
    return llm.get_weight_version() if hasattr(llm, "get_weight_version") else None
