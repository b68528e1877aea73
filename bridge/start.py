"""Starts and stops vLLM for VllmEngine: its options, its process, its memory."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.errors import BadConfig
from isojax.rl.engine_defaults import DEFAULT_KV_CACHE_BYTES, DEFAULT_SEQUENCES, DEFAULT_STEP_TOKENS

if TYPE_CHECKING:
    from vllm import LLM

    from contracts import ExecutionContract


_LEAST = {
    "max_context": (0, "It is a number of tokens; 0 takes the policy's own limit."),
    "max_step_tokens": (1, "A step computes a token."),
    "max_sequences": (1, "A step serves a request."),
    "kv_cache_bytes": (1, "Keys and values need memory."),
    "page_size": (0, "It is a number of tokens; 0 takes the platform's own."),
    "seed": (0, "vLLM's generators take no other."),
}

CPU_PAGE_SIZE = 32
FREE_AT_START = 0.1
"""Share of a card that must be free when vLLM starts. Its cache has a size of its own, kv_cache_bytes, so a trainer in
the same process keeps the rest; vLLM's default share would be refused beside it."""


@dataclass(frozen=True)
class EngineOptions:
    """How vLLM is run. None of these changes a bit of a log-probability.

    separate_process: vLLM in processes of its own (spawned), else in this one. max_context: tokens of prompt and
    completion; 0 takes the policy's own limit. max_step_tokens: tokens of one step; longer prompts are prefilled in
    chunks. max_sequences: requests run at once. kv_cache_bytes: memory for keys and values. page_size: tokens a page; 0
    takes 32 on a CPU and the sealed kernels' own on a card. prefix_cache: reuse of cached prefixes. cuda_graphs: on a
    card, replay captured steps. sleep_mode: on a card, whether `VllmEngine.sleep` may give memory back.
    initial_weights: read the folder's weights at the start; without, it need not hold any, and the first sync brings
    them. seed: of vLLM itself; requests without a seed draw fresh ones.
    """

    separate_process: bool = False
    max_context: int = 0
    max_step_tokens: int = DEFAULT_STEP_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    page_size: int = 0
    prefix_cache: bool = True
    cuda_graphs: bool = True
    sleep_mode: bool = False
    initial_weights: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what vLLM would accept and fail on later."""
        for name, (least, reason) in _LEAST.items():
            if getattr(self, name) < least:
                raise BadConfig(
                    field=f"engine.settings.{name}",
                    found=getattr(self, name),
                    allowed=f"{least} or more",
                    reason=reason,
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> EngineOptions:
        """Options from a TOML table or keyword arguments.

        Raises BadConfig for an unknown name, a wrong type or a value out of range.
        """
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in settings.items():
            if name not in known or type(value) is not known[name]:
                raise BadConfig(
                    field=f"engine.settings.{name}",
                    found=value,
                    allowed=", ".join(f"{option}: {kind.__name__}" for option, kind in known.items()),
                    reason="The vLLM engine has no such setting, or another type for it.",
                )
        return cls(**settings)


def start_vllm(folder: Path, contract: ExecutionContract, options: EngineOptions) -> LLM:
    """A running vLLM on the policy folder. Raises BadConfig for what no CPU can do."""
    from bridge.arrays import dispatch_synchronously
    from bridge.settings import is_for_cpu

    dispatch_synchronously()
    on_card = not is_for_cpu(contract)
    if options.sleep_mode and not on_card:
        raise BadConfig(
            field="engine.settings.sleep_mode",
            found=True,
            allowed="false on a CPU",
            reason="Sleeping gives a card's memory to somebody else on that card.",
        )
    return _start(
        folder,
        options,
        on_card=on_card,
        dtype=contract.semantics.compute_dtype,
        max_model_len=options.max_context or contract.model.max_position,
        max_num_batched_tokens=options.max_step_tokens,
        block_size=options.page_size or (None if on_card else CPU_PAGE_SIZE),
        enable_chunked_prefill=True,
        enforce_eager=not options.cuda_graphs,
        enable_sleep_mode=options.sleep_mode,
    )


def start_stock_vllm(folder: Path, dtype: str, max_position: int, options: EngineOptions) -> LLM:
    """A running stock vLLM on an ordinary Hugging Face folder, with the same options.

    On a card it compiles and captures as by default. On a CPU it runs eagerly and prefills in one piece, since requests
    with seeds of their own fail there when their prompt is cut.
    """
    import torch

    # It warns at every sync that a rotary embedding, which has no weights, was given none.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    on_card = torch.cuda.is_available()
    context = options.max_context or max_position
    return _start(
        folder,
        options,
        on_card=on_card,
        dtype=dtype,
        max_model_len=context,
        max_num_batched_tokens=options.max_step_tokens if on_card else max(options.max_step_tokens, context),
        block_size=options.page_size or None,
        enable_chunked_prefill=on_card,
        enforce_eager=not (on_card and options.cuda_graphs),
        # At the temperature that a token was sampled at.
        logprobs_mode="processed_logprobs",
        # Without a folder's own defaults for sampling.
        generation_config="vllm",
    )


def _start(folder: Path, options: EngineOptions, *, on_card: bool, **settings: Any) -> LLM:
    """vLLM with what both arms share, and the settings that differ."""
    for_card: dict[str, Any] = {"gpu_memory_utilization": FREE_AT_START} if on_card else {}
    with _environment(
        # FlashInfer's sampler is compiled at run time; ours draws instead.
        VLLM_USE_FLASHINFER_SAMPLER="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="1" if options.separate_process else "0",
        # Spawned, since a forked process inherits JAX's threads in a state that deadlocks.
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_NO_USAGE_STATS="1",
        # vLLM logs every reset of its prefix cache, that is one line a training step, into the progress bar.
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    ):
        from vllm import LLM

        return LLM(
            model=str(folder),
            # Token ids in, token ids out: the engine never sees text.
            skip_tokenizer_init=True,
            max_num_seqs=options.max_sequences,
            kv_cache_memory_bytes=options.kv_cache_bytes,
            enable_prefix_caching=options.prefix_cache,
            seed=options.seed,
            # vLLM's dummy weights have no digest, so nothing is sampled from them.
            load_format="auto" if options.initial_weights else "dummy",
            **for_card,
            **settings,
        )


def stop_vllm(llm: LLM) -> None:
    """Ends vLLM's processes, or frees what it holds in this one, so that another engine can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """vLLM reads some of its settings from the environment alone; the caller's own values come back afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
