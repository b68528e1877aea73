"""The engine's side of the handshake: what vLLM and the worker really run, as an EngineReport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.settings import is_for_cpu, mesh_of, runner_of
from contracts import EngineReport, ExecutionContract, FrozenMap, Toolchain
from isojax.weights.tokenizer import tokenizer_digest, tokenizer_files
from pallas_kernels.seal import MODULE_FORMAT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENGINE_CASES = ("engine_prefill", "engine_decode")


def engine_report(
    folder: Path, contract: ExecutionContract, vllm_config: VllmConfig, described: Mapping[str, Any]
) -> EngineReport:
    """The report. described: what the worker said about itself (`IsojaxPolicyForCausalLM.describe`).

    contract: as the engine loaded it. On a CPU a region has no sealed kernel, so its set of kernel digests is empty; on
    a card they are those that were really compiled (installed) and launched (served).
    """
    return EngineReport(
        contract=contract,
        mesh=FrozenMap(mesh_of(vllm_config)),
        device_kind=described["device_kind"],
        toolchain=_toolchain(contract, vllm_config, described),
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
        installed=kernel_record(described.get("installed") or dict.fromkeys(ENGINE_CASES, described["regions"])),
        served=kernel_record(described["served"]),
    )


def kernel_record(regions: Mapping[str, Sequence[str] | Mapping[str, Sequence[str]]]) -> FrozenMap[Any]:
    """Regions by case, each with its kernel digests; a plain list of regions has none, as on a CPU."""
    return FrozenMap({case: FrozenMap(_digests(names)) for case, names in regions.items()})


def _digests(names: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    if isinstance(names, Mapping):
        return {name: tuple(digests) for name, digests in names.items()}
    return dict.fromkeys(names, ())


def _toolchain(contract: ExecutionContract, vllm_config: VllmConfig, described: Mapping[str, Any]) -> Toolchain:
    for_cpu = is_for_cpu(contract)
    # Until a gate has run on a card a contract names no ptxas, and none is compared.
    unproved = contract.toolchain.ptxas is None
    return Toolchain(
        jax=version("jax"),
        jaxlib=version("jaxlib"),
        module_format="xla_cpu" if for_cpu else MODULE_FORMAT,
        ptxas=None if for_cpu or unproved else described["ptxas"],
        kernel_manifest=None if for_cpu else described["kernel_manifest"],
        engine_runner=runner_of(vllm_config),
    )
