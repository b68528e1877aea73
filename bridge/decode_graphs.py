"""CUDA graphs of their own for decode steps, beside vLLM's for steps of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from bridge.gpu_attention import capturing


class _MarkedCapture(CudaGraphManager):
    """Tells attention's metadata whether the graph that is being captured is a decode step's.

    vLLM's dummy batch does not say: that of a mixed graph of few tokens has one token a request as well.
    """

    def capture(self, create_forward_fn: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """vLLM's capture of every graph."""

        def marked(desc: BatchExecutionDescriptor, *how: Any, **also: Any) -> Any:
            with capturing(decode=desc.uniform_token_count == 1):
                return create_forward_fn(desc, *how, **also)

        return super().capture(marked, *arguments, **keywords)


# In this order, so that the model's manager hands what it captures to the one that marks it. The two overrides of
# `capture` take what vLLM's own two take, which differ as much.
class DecodeGraphs(ModelCudaGraphManager, _MarkedCapture):  # type: ignore[misc]
    """vLLM's manager with a second full graph of every size that decode steps are padded to.

    It is tried first, and fits where every request of a step has one token; then attention needs one kernel less.
    """

    def __init__(self, manager: ModelCudaGraphManager, decode_buckets: Sequence[int]) -> None:
        """manager: vLLM's, before its capture. decode_buckets: tokens that decode's attention is sealed for."""
        # Read by what vLLM's own __init__ calls.
        self._decode_buckets = frozenset(decode_buckets)
        super().__init__(
            manager.vllm_config,
            manager.device,
            manager.cudagraph_mode,
            manager.decode_query_len,
            lora_capture_cases=manager.lora_capture_cases,
        )

    def _init_candidates(self) -> None:
        super()._init_candidates()
        sizes = sorted(self.compilation_config.cudagraph_capture_sizes or [])
        # A larger step than there are requests is none of decoding.
        wanted = {size for size, before in zip(sizes, (0, *sizes), strict=False) if before < self.max_num_reqs}
        wanted &= self._decode_buckets

        def decoding(full: BatchExecutionDescriptor) -> list[BatchExecutionDescriptor]:
            fits = full.cg_mode == CUDAGraphMode.FULL and full.num_tokens in wanted
            return [replace(full, uniform_token_count=1)] if fits else []

        for key, candidates in self._candidates.items():
            self._candidates[key] = [*(graph for full in candidates for graph in decoding(full)), *candidates]
        for mode, graphs in self._capture_descs.items():
            self._capture_descs[mode] = [graph for full in graphs for graph in (*decoding(full), full)]
