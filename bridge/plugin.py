"""The entry point that vLLM calls in each of its processes: makes exported policies loadable, changes nothing else."""

from __future__ import annotations


def register() -> None:
    """Registers the model class, its settings and the weight transfer backend. Cheap, and safe to call twice.

    Only names are registered where vLLM allows it, so that serving another model imports neither JAX nor the policy.
    """
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.platforms import current_platform

    from bridge.settings import ARCHITECTURE, EngineSettings
    from bridge.weight_sync import BACKEND

    if ARCHITECTURE not in MODELS_CONFIG_MAP:
        model = "bridge.gpu_model:GpuPolicyModel" if current_platform.is_cuda() else f"bridge.model:{ARCHITECTURE}"
        ModelRegistry.register_model(ARCHITECTURE, model)
        MODELS_CONFIG_MAP[ARCHITECTURE] = EngineSettings
        WeightTransferEngineFactory.register_engine(BACKEND, "bridge.weight_sync", "StagedWeightTransfer")
