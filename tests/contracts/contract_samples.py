"""Contracts and engine reports that the contract tests start from, and a walk over a contract's leaves."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from contracts import (
    CASES,
    Claims,
    CompositionEntry,
    EngineReport,
    ExecutionContract,
    ModelSection,
    Semantics,
    Toolchain,
    topology,
)
from contracts.section import BelongsTo, Section

TRAINER, ENGINE = CASES[:2], CASES[2:]
DIGEST = "0123456789abcdef" * 4
OTHER_DIGEST = "fedcba9876543210" * 4


def entry(region: str, cases=CASES, *, impl_id: str | None = None, **changes: Any) -> CompositionEntry:
    fields = {
        "region": region,
        "cases": cases,
        "impl_id": impl_id or region,
        "version": 1,
        "arch": "cpu-avx2",
        "constants": {},
        "kernel_digests": {},
        "gate": "tests/parity",
    }
    return CompositionEntry(**fields | changes)


@cache
def smollm2() -> ExecutionContract:
    """SmolLM2-135M on a CPU: 9 heads over 3 KV heads, every axis pinned to 1."""
    return ExecutionContract(
        schema_version=1,
        model=ModelSection(
            family="llama",
            architecture="LlamaForCausalLM",
            config_digest=DIGEST,
            tokenizer_digest=DIGEST,
            num_layers=30,
            hidden_size=576,
            intermediate_size=1536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            num_experts=0,
            vocab_size=49152,
            max_position=8192,
        ),
        cases=CASES,
        composition=(
            entry("matmul", constants={"leaves": 4, "column_tile": 192}),
            entry("rms_norm", constants={"eps": 1e-5, "round_before_scale": True}),
            entry("attention", TRAINER, constants={"split": 512}),
            entry("attention", ENGINE, impl_id="paged_attention", constants={"split": 512}),
        ),
        semantics=Semantics(
            temperature=1.0,
            sampling_filters="none",
            sampling_rng="vllm_v1",
            nan_policy="refuse",
            padded_vocab_size=49152,
            padding_logit="-inf",
            vocabulary_leaves=8,
            split_k_leaves=4,
            rope_table_digest=DIGEST,
            parameter_dtype="bfloat16",
            compute_dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            head_operand_dtype="bfloat16",
            head_output_dtype="float32",
            quantization="none",
            adapters="none",
        ),
        claims=Claims(
            topology=topology("tests/parity"),
            device_kinds=("cpu",),
            state="proved",
            invalidated_by=("toolchain", "device_kind"),
            tolerances={},
        ),
        toolchain=Toolchain(
            jax="0.10.2",
            jaxlib="0.10.2",
            module_format="xla_cpu",
            ptxas=None,
            kernel_manifest=None,
            engine_runner="vllm_v1",
        ),
    ).sealed()


@cache
def qwen3_on_hopper() -> ExecutionContract:
    """Qwen3-8B shapes on sm90 with sealed kernels: tp proved over 1, 2 and 4, fsdp over 1 and 8."""
    base = smollm2()
    sealed = {"arch": "sm90", "kernel_digests": {"small_m": DIGEST, "large_m": OTHER_DIGEST}}
    return base.replaced(
        model=base.model.model_copy(
            update={
                "family": "qwen3",
                "architecture": "Qwen3ForCausalLM",
                "num_layers": 36,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_heads": 32,
                "num_kv_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            }
        ),
        composition=(
            entry("matmul", constants={"leaves": 4, "scale": -0.0}, **sealed),
            entry("attention", TRAINER, constants={"split": 512}, **sealed),
            entry("attention", ENGINE, impl_id="paged_attention", constants={"split": 512}, **sealed),
        ),
        semantics=base.semantics.model_copy(update={"padded_vocab_size": 152064}),
        claims=Claims(
            topology=topology("tests/gpu/mesh", {"tp": (1, 2, 4), "fsdp": (1, 8)}),
            device_kinds=("NVIDIA H200", "NVIDIA H100 80GB HBM3"),
            state="proved",
            invalidated_by=("toolchain", "device_kind"),
            tolerances={"logit": 0.5},
        ),
        toolchain=Toolchain(
            jax="0.11.2",
            jaxlib="0.11.2",
            module_format="mosaic_gpu_v2",
            ptxas="13.0.88",
            kernel_manifest=DIGEST,
            engine_runner="vllm_v2",
        ),
    )


def report(contract: ExecutionContract, **changes: Any) -> EngineReport:
    """What an engine that follows the contract in everything would say."""
    semantics = contract.semantics
    record = {
        case: {item.impl_id: tuple(item.kernel_digests.values()) for item in contract.composition if case in item.cases}
        for case in ENGINE
    }
    fields = {
        "contract": contract,
        "mesh": {"tp": 1},
        "device_kind": contract.claims.device_kinds[0],
        "toolchain": contract.toolchain,
        "tokenizer_digest": contract.model.tokenizer_digest,
        "installed": record,
        "served": record,
    }
    live = (
        "temperature rope_table_digest padded_vocab_size parameter_dtype compute_dtype kv_cache_dtype "
        "head_operand_dtype head_output_dtype quantization adapters"
    )
    fields |= {name: getattr(semantics, name) for name in live.split()} | {"weight_digest": "0011223344556677"}
    return EngineReport(**fields | changes)


Path = tuple[str | int, ...]


def leaves(section: Section, path: Path = ()) -> Iterator[tuple[Path, BelongsTo, tuple[type[Section], str]]]:
    """Every leaf of a contract: its path, its declaration, and the class and field that declare it."""
    for name, declared in section.declarations.items():
        value = getattr(section, name)
        if declared is not None:
            yield (*path, name), declared, (type(section), name)
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from leaves(item, (*path, name, index))
        elif value is not None:
            yield from leaves(value, (*path, name))


def value_at(section: Any, path: Path) -> Any:
    for step in path:
        section = section[step] if isinstance(step, int) else getattr(section, step)
    return section


def with_value(section: Any, path: Path, value: object) -> Any:
    """A copy with one leaf exchanged, unvalidated: identities must rotate even for values that are not legal yet."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        return (*section[:step], with_value(section[step], rest, value), *section[step + 1 :])
    return section.model_copy(update={step: with_value(getattr(section, step), rest, value)})
