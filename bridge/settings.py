"""What vLLM must be set to for an isojax policy: set where it was left open, refused where it was chosen otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vllm.config import CompilationMode
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from bridge.gpu_settings import GPU_WORKER, set_for_kernels
from bridge.refused_settings import refused
from bridge.sampling import SAMPLING_RNG
from bridge.weight_sync import BACKEND
from contracts import ExecutionContract, load_contract

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# `EXPORTED_ARCHITECTURE` of isojax.policy.config, here without importing JAX into every process of vLLM.
ARCHITECTURE = "IsojaxPolicyForCausalLM"
CPU_WORKER = "bridge.worker.IsojaxCpuWorker"
SAMPLING_PROCESSOR = "bridge.sampling:SeededSampling"
LOGPROBS_MODE: Literal["raw_logits"] = "raw_logits"

_UNFILTERED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling defaults of the server, in place of those in the checkpoint's generation_config.json."""


class EngineSettings(VerifyAndUpdateConfig):
    """vLLM's hook for a model's own configuration; it runs for the LLM class and for `vllm serve` alike."""

    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Log-probabilities verbatim, our sampling, no filters by default; refuses another dtype or quantisation."""
        contract = load_contract(Path(model_config.model))
        _check_dtype(model_config, contract)
        if model_config.quantization is not None:
            raise refused("quantization", model_config.quantization, "none", "Quantised weights are other weights.")
        if model_config.logprobs_mode not in ("raw_logprobs", LOGPROBS_MODE):
            raise refused(
                "logprobs_mode",
                model_config.logprobs_mode,
                LOGPROBS_MODE,
                "The model returns finished log-probabilities; any other mode would compute them anew.",
            )
        model_config.logprobs_mode = LOGPROBS_MODE
        _set_sampling(model_config, contract)
        model_config.override_generation_config = {**_UNFILTERED, **(model_config.override_generation_config or {})}
        if model_config.max_model_len is not None and model_config.max_model_len > contract.model.max_position:
            raise refused(
                "max_model_len",
                model_config.max_model_len,
                f"at most {contract.model.max_position}",
                "The rope table that ships with the policy ends there.",
            )
        if is_for_cpu(contract):
            # torch.compile could fuse and reorder; the graph is run as it is written.
            model_config.enforce_eager = True

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Worker, weight transfer, mesh, cache; refuses what no gate has proved."""
        contract = load_contract(Path(vllm_config.model_config.model))
        contract.check_mesh(mesh_of(vllm_config))
        _check_cache(vllm_config, contract)
        _check_features(vllm_config)
        _check_platform(contract)
        _set_worker(vllm_config, CPU_WORKER if is_for_cpu(contract) else GPU_WORKER)
        if not is_for_cpu(contract):
            # Imported here, since vLLM on a CPU asks for these settings too and needs no kernel.
            from isojax.kernels import load_kernels

            folder = Path(vllm_config.model_config.model)
            set_for_kernels(vllm_config, load_kernels(folder, contract).shapes)
        if vllm_config.weight_transfer_config is None:
            vllm_config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
        elif vllm_config.weight_transfer_config.backend != BACKEND:
            raise refused(
                "weight_transfer_config.backend",
                vllm_config.weight_transfer_config.backend,
                BACKEND,
                "The engine's parameters are packed and digested; another backend would write past both.",
            )
        if contract.semantics.sampling_rng != SAMPLING_RNG:
            raise refused(
                "semantics.sampling_rng",
                contract.semantics.sampling_rng,
                SAMPLING_RNG,
                "A seed would give other tokens than the contract says.",
            )
        runner = runner_of(vllm_config)
        if runner != contract.toolchain.engine_runner:
            raise refused(
                "model runner",
                runner,
                contract.toolchain.engine_runner,
                "No gate ran with it; VLLM_USE_V2_MODEL_RUNNER chooses it: 0 for V1, 1 for V2.",
            )


def is_for_cpu(contract: ExecutionContract) -> bool:
    """Whether a contract's regions are XLA:CPU code, and not sealed kernels."""
    return contract.arch.startswith("cpu-")


def mesh_of(vllm_config: VllmConfig) -> dict[str, int]:
    """The engine's mesh in the contract's axes, from vLLM's parallel config."""
    parallel = vllm_config.parallel_config
    return {
        "dp": parallel.data_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "tp": parallel.tensor_parallel_size,
        "ep": parallel.tensor_parallel_size * parallel.data_parallel_size if parallel.enable_expert_parallel else 1,
        "cp": max(
            parallel.decode_context_parallel_size,
            getattr(parallel, "prefill_context_parallel_size", 1),
        ),
    }


def runner_of(vllm_config: VllmConfig) -> str:
    """The model runner that vLLM will use, as contracts name it."""
    return "vllm_v2" if vllm_config.use_v2_model_runner else "vllm_v1"


def _check_platform(contract: ExecutionContract) -> None:
    if is_for_cpu(contract) and not current_platform.is_cpu():
        raise refused(
            "platform",
            current_platform.device_type,
            "cpu",
            "This contract's regions are XLA:CPU code; an sm90 policy is exported with --arch sm90.",
        )
    if not is_for_cpu(contract) and not current_platform.is_cuda():
        raise refused(
            "platform",
            current_platform.device_type,
            "cuda",
            f"This contract's regions are kernels for {contract.arch}; a CPU policy is exported with --arch cpu.",
        )


def _set_worker(vllm_config: VllmConfig, worker: str) -> None:
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in ("auto", worker):
        raise refused("worker_cls", parallel.worker_cls, worker, "The worker names the owner of every row.")
    parallel.worker_cls = worker


def _set_sampling(model_config: ModelConfig, contract: ExecutionContract) -> None:
    # On a card the draw is the model's own sampler, and vLLM's V2 runner takes no processors at all.
    wanted = [SAMPLING_PROCESSOR] if is_for_cpu(contract) else []
    processors = list(model_config.logits_processors or [])
    if processors not in ([], wanted):
        raise refused(
            "logits_processors", processors, "none", "A processor changes the distribution that is sampled from."
        )
    model_config.logits_processors = [*wanted] or None


def _check_dtype(model_config: ModelConfig, contract: ExecutionContract) -> None:
    found = str(model_config.dtype).removeprefix("torch.")
    wanted = contract.semantics.compute_dtype
    if found != wanted:
        raise refused(
            "dtype",
            found,
            f"{wanted} (pass dtype={wanted!r}, on the command line --dtype {wanted})",
            "Activations would be rounded on one side and not on the other. vLLM's own default turns float32 policies "
            "into bfloat16.",
        )


def _check_cache(vllm_config: VllmConfig, contract: ExecutionContract) -> None:
    found = vllm_config.cache_config.cache_dtype
    wanted = contract.semantics.kv_cache_dtype
    if found not in ("auto", wanted):
        raise refused(
            "kv_cache_dtype",
            found,
            f"auto or {wanted}",
            "Cached keys and values would differ from those that the trainer computes.",
        )


def _check_features(vllm_config: VllmConfig) -> None:
    proposals = (
        ("speculative_config", vllm_config.speculative_config, "Accepted drafts follow another sampling rule."),
        ("lora_config", vllm_config.lora_config, "An adapter beside the weights rounds otherwise than a merged one."),
        ("kv_transfer_config", vllm_config.kv_transfer_config, "Keys and values from elsewhere have no known weights."),
    )
    for field, found, reason in proposals:
        if found is not None:
            raise refused(field, found, "none", reason)
    mode = vllm_config.compilation_config.mode
    if mode not in (None, CompilationMode.NONE):
        raise refused(
            "compilation_config.mode",
            mode.name if isinstance(mode, CompilationMode) else mode,
            "NONE (0)",
            "A compiler may fuse and reorder what the regions round.",
        )
