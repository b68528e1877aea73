"""The engine's side of the handshake: what vLLM and the worker really run, as an EngineReport."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.settings import mesh_of, runner_of
from contracts import EngineReport, ExecutionContract, FrozenMap, Toolchain
from isojax.weights.tokenizer import tokenizer_digest, tokenizer_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENGINE_CASES = ("engine_prefill", "engine_decode")


def engine_report(
    folder: Path, contract: ExecutionContract, vllm_config: VllmConfig, described: Mapping[str, Any]
) -> EngineReport:
    """The report. described: what the worker said about itself (`IsojaxPolicyForCausalLM.describe`).

    contract: as the engine loaded it. On a CPU a region has no sealed kernel, so its set of kernel digests is empty.
    """
    return EngineReport(
        contract=contract,
        mesh=FrozenMap(mesh_of(vllm_config)),
        device_kind=described["device_kind"],
        toolchain=Toolchain(
            jax=version("jax"),
            jaxlib=version("jaxlib"),
            module_format="xla_cpu",
            ptxas=None,
            kernel_manifest=None,
            engine_runner=runner_of(vllm_config),
        ),
        temperature=described["temperature"],
        tokenizer_digest=tokenizer_digest(tokenizer_files(folder)),
        rope_table_digest=described["rope_table_digest"],
        padded_vocab_size=described["head_rows"],
        parameter_dtype=described["parameter_dtype"],
        compute_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        kv_cache_dtype=described["kv_cache_dtype"],
        head_operand_dtype=described["head_operand_dtype"],
        head_output_dtype=described["head_output_dtype"],
        quantization=vllm_config.model_config.quantization or "none",
        adapters="unmerged" if vllm_config.lora_config is not None else "none",
        weight_digest=described["weight_digest"],
        installed=kernel_record(dict.fromkeys(ENGINE_CASES, described["regions"])),
        served=kernel_record(described["served"]),
    )


def kernel_record(regions: Mapping[str, list[str]]) -> FrozenMap[Any]:
    """Regions by case, each with its kernel digests (none on a CPU)."""
    return FrozenMap({case: FrozenMap(dict.fromkeys(names, ())) for case, names in regions.items()})
