"""What vLLM must be set to for sealed kernels on a card: set where it was left open, refused where it differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms import current_platform

from bridge.refused_settings import refused
from bridge.requests import check_sampling_params
from bridge.step_inputs import smallest_bucket

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pallas_kernels.kernel_shapes import KernelShapes

GPU_WORKER = "bridge.gpu_worker.IsojaxGpuWorker"
SEALED = "The policy's kernels were sealed for these sizes and are never lowered in the engine; export it with others."
UNCHOSEN_GRAPHS = (None, CUDAGraphMode.FULL)


def set_for_kernels(vllm_config: VllmConfig, shapes: KernelShapes) -> None:
    """Compilation, CUDA graphs, cache and limits as the sealed kernels need them. Raises UnsupportedModel by name."""
    check_requests_here()
    _set_sizes(vllm_config, shapes)
    _set_graphs(vllm_config, shapes)
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        raise refused("kv_cache_dtype_skip_layers", vllm_config.cache_config.kv_cache_dtype_skip_layers, "none", SEALED)
    # Nothing of ours runs in FlashInfer, and tuning it would take minutes.
    vllm_config.kernel_config.enable_flashinfer_autotune = False


def check_requests_here() -> None:
    """From now on this process refuses requests outside of the contract before they are queued, Python's and HTTP's.

    The V2 runner takes no logits processors, whose validation does this on a CPU, and what its worker refuses ends the
    engine for everybody. vLLM asks the platform about every request; a process that runs a policy runs no other model.
    """
    if not isinstance(current_platform.validate_request, _RequestCheck):
        current_platform.validate_request = _RequestCheck(  # type: ignore[method-assign]
            current_platform.validate_request
        )


class _RequestCheck:
    """The platform's own check, then ours."""

    def __init__(self, platforms_own: Callable[..., None]) -> None:
        self._platforms_own = platforms_own

    def __call__(self, processed_inputs: Any, params: Any) -> None:
        self._platforms_own(processed_inputs, params)
        if isinstance(params, SamplingParams):
            check_sampling_params(params)


def _set_sizes(vllm_config: VllmConfig, shapes: KernelShapes) -> None:
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not cache.user_specified_block_size:
        cache.block_size = shapes.page_size
        # Or vLLM would go on to choose one for the attention backend.
        cache.user_specified_block_size = True
    limits = (
        ("max_num_seqs", scheduler.max_num_seqs, shapes.max_requests),
        ("max_model_len", vllm_config.model_config.max_model_len, shapes.max_context),
        ("max_num_batched_tokens", scheduler.max_num_batched_tokens, shapes.token_buckets[-1]),
    )
    if cache.block_size != shapes.page_size:
        raise refused("block_size", cache.block_size, shapes.page_size, SEALED)
    for field, found, limit in limits:
        if found > limit:
            raise refused(field, found, f"at most {limit}", SEALED)


def _set_graphs(vllm_config: VllmConfig, shapes: KernelShapes) -> None:
    compilation = vllm_config.compilation_config
    # torch.compile could fuse and reorder; the graph is run as it is written.
    compilation.mode = CompilationMode.NONE
    if vllm_config.model_config.enforce_eager or compilation.cudagraph_mode == CUDAGraphMode.NONE:
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        return
    if compilation.cudagraph_mode not in UNCHOSEN_GRAPHS:
        raise refused(
            "compilation_config.cudagraph_mode",
            compilation.cudagraph_mode.name,
            "FULL, or NONE to run without graphs",
            "Piecewise graphs need torch.compile, which may fuse and reorder what the regions round; decode steps get "
            "full graphs of their own beside those of FULL.",
        )
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    step = vllm_config.scheduler_config.max_num_batched_tokens
    largest = smallest_bucket(shapes.token_buckets, step, "max_num_batched_tokens")
    # A step of more tokens than the last of them runs without a graph, padded to the next bucket by the model.
    sizes = [bucket for bucket in shapes.token_buckets if bucket <= min(largest, step)]
    if compilation.cudagraph_capture_sizes not in (None, [], sizes):
        wrong = sorted(set(compilation.cudagraph_capture_sizes) - set(shapes.token_buckets))
        if wrong:
            raise refused(
                "compilation_config.cudagraph_capture_sizes", wrong, f"some of {list(shapes.token_buckets)}", SEALED
            )
        sizes = sorted(compilation.cudagraph_capture_sizes)
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]
