"""Build the execution contract of a policy: what it is made of, read from the policy and its audit."""

from collections.abc import Iterable, Mapping
from functools import partial

import jax
import jaxlib
import numpy as np

from contracts import (
    AXES,
    CASES,
    Case,
    Claims,
    CompositionEntry,
    ExecutionContract,
    FrozenMap,
    InvariantClaim,
    ModelSection,
    PinnedClaim,
    Semantics,
    Toolchain,
    check_temperature,
    float_bits,
    topology,
)
from contracts.errors import BadConfig, MeshNotClaimed
from isojax.audit import AuditReport, RegionCall
from isojax.cpu_arch import cpu_arch
from isojax.kernels import Bundle, kernel_digests
from isojax.mesh import PROVED_DEGREES, fits_fsdp
from isojax.policy.config import PolicyConfig, config_digest
from isojax.policy.policy import Policy
from isojax.policy.rope import rope_table_digest
from isojax.policy_audit import audit_engine, audit_trainer
from isojax.weights.tokenizer import tokenizer_digest
from pallas_kernels import REGIONS
from pallas_kernels.lm_head.spec import LEAVES as VOCABULARY_LEAVES
from pallas_kernels.seal import ARCHITECTURE, MODULE_FORMAT, SEALING_JAX

TRAINER_CASES, ENGINE_CASES = CASES[:2], CASES[2:]
CPU_ENGINE_RUNNER, SM90_ENGINE_RUNNER = "vllm_v1", "vllm_v2"
MESH_GATE = "tests/isojax/test_mesh.py::test_a_sharded_policy_equals_one_device"
PARITY_GATE = "tests/parity"
SM90_GATE = "isojax verify --arch sm90"
CPU_KIND = "cpu"
"""What JAX calls every CPU. Asked of JAX it would need one that has its CPU, which JAX_PLATFORMS may leave out."""
# The primitives that own a region of the contract, where they differ between cases.
_OWNERS: Mapping[str, Mapping[str, tuple[Case, ...]]] = {
    "attention": {"attention": TRAINER_CASES, "paged_attention": ENGINE_CASES},
    "log_probs": {"token_log_probs": TRAINER_CASES, "log_prob_rows": ENGINE_CASES},
    # Under gradients SwiGLU ends what a call of the region matmul began.
    "gated_matmul": {"swiglu": CASES[:1], "gated_matmul": CASES[1:]},
}
# On a card the engine's kernel for the one also writes the cache, and steps of decoding have an attention of their own.
_SM90_OWNERS = {
    **_OWNERS,
    "attention": {
        "attention": TRAINER_CASES,
        "paged_attention": ENGINE_CASES[:1],
        "paged_decode_attention": ENGINE_CASES[1:],
    },
    "qk_norm_rope": {"qk_norm_rope": TRAINER_CASES, "paged_qk_norm_rope": ENGINE_CASES},
}
# The engine's graph takes the paged binding at the calls that the policy makes to the packed one.
_AUDITED = {
    "paged_attention": "attention",
    "paged_decode_attention": "attention",
    "paged_qk_norm_rope": "qk_norm_rope",
}


def build_contract(
    policy: Policy,
    *,
    tokenizer: Mapping[str, bytes],
    arch: str = "cpu",
    temperature: float = 1.0,
    engine_runner: str | None = None,
    kernels: Bundle | None = None,
) -> ExecutionContract:
    """The sealed contract of a policy: on this machine's CPU, or of its sealed kernels on sm90.

    tokenizer: the tokenizer's files by name, empty for a policy that knows tokens only. temperature: T of
    log_softmax(logits / T). The composition is what the audit finds in the policy's own forward, with the parameters of
    every call, so a policy with stray arithmetic has no contract. engine_runner: vllm_v1 on a CPU and vllm_v2 on sm90
    where None. kernels: what `isojax.kernels.sealing.seal_policy` gave, for sm90 and only for it. An sm90 contract is
    unproved: no gate has run on a card, so it refuses every mesh until one has.

    Raises `UncoveredArithmetic` for such a policy and `BadConfig` for an architecture without kernels or a temperature
    that float32 does not hold.
    """
    temperature = check_temperature(temperature)
    if arch not in ("cpu", "sm90") or (arch == "sm90") != (kernels is not None):
        raise BadConfig(
            field="arch",
            found=f"{arch} {'without' if kernels is None else 'with'} sealed kernels",
            allowed=["cpu", "sm90 with sealed kernels"],
            reason="On a GPU a region is its sealed kernels, and the CPU form has none.",
        )
    return ExecutionContract(
        schema_version=1,
        model=_model(policy.config, tokenizer_digest(tokenizer)),
        cases=CASES,
        composition=tuple(_composition(policy, kernels)),
        semantics=_semantics(policy, temperature),
        claims=_claims(policy) if kernels is None else _unproved_claims(),
        toolchain=_toolchain(engine_runner, kernels),
    ).sealed()


def require_claimable(policy: Policy, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh that no gate can prove of this policy, before a contract is made. Raises `MeshNotClaimed`."""
    provable = _degrees(policy)
    for axis, degree in mesh.items():
        degrees = provable.get(axis, (1,))
        if degree not in degrees:
            raise MeshNotClaimed(
                field=f"mesh.{axis}",
                found=f"{axis}={degree}",
                allowed=f"{axis} in {', '.join(map(str, degrees))}",
                reason="The gate of meshes runs these degrees alone, where every weight can be cut into as many equal "
                "pieces."
                if axis in provable
                else "No gate runs this axis at another degree.",
            )


def audit_policy(policy: Policy) -> tuple[AuditReport, AuditReport]:
    """Audits of the trainer's forward (sampled tokens) and the engine's (hidden states and full rows)."""
    return audit_trainer(policy), audit_engine(policy)


def _model(config: PolicyConfig, tokenizer: str) -> ModelSection:
    return ModelSection(
        family=config.family,
        architecture=config.architecture,
        config_digest=config_digest(config),
        tokenizer_digest=tokenizer,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_experts=0,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
    )


def _composition(policy: Policy, kernels: Bundle | None) -> Iterable[CompositionEntry]:
    trainer, engine = audit_policy(policy)
    digests = {} if kernels is None else kernel_digests(kernels)
    arch, gate = (cpu_arch(), PARITY_GATE) if kernels is None else (ARCHITECTURE, SM90_GATE)
    made = dict(zip(CASES, (trainer.differentiated, trainer.calls, engine.calls, engine.calls), strict=True))
    entry = partial(_entry, calls=made, arch=arch, digests=digests)
    owners = _OWNERS if kernels is None else _SM90_OWNERS
    found = {call.region for calls in made.values() for call in calls}
    for primitive in sorted(found - {owner for several in owners.values() for owner in several}):
        yield entry(primitive, primitive, CASES)
    for region, several in owners.items():
        for primitive, cases in several.items():
            yield entry(region, primitive, cases, gate=gate)


def _entry(
    region: str,
    primitive: str,
    cases: tuple[Case, ...],
    *,
    calls: Mapping[Case, Iterable[RegionCall]],
    arch: str,
    digests: Mapping[str, Mapping[str, str]],
    gate: str | None = None,
) -> CompositionEntry:
    declared = REGIONS[primitive]
    # Of the first case, which calls it most: under gradients the matmul also takes a part of another region.
    parameters = [call.parameters for call in calls[cases[0]] if call.region == _AUDITED.get(primitive, primitive)]
    constants = dict(declared.spec.constants)
    for name in declared.parameters:
        values = [call[name] for call in parameters]
        # One value where all calls agree, else the values in program order: 1, 4, 1, 4 leaves.
        constants[name] = values[0] if len(set(values)) == 1 else ",".join(map(str, values))
    return CompositionEntry(
        region=region,
        cases=cases,
        impl_id=primitive,
        version=int(declared.version),
        arch=arch,
        constants=FrozenMap({name: _constant(value) for name, value in constants.items()}),
        kernel_digests=FrozenMap(digests.get(primitive, {})),
        gate=gate,
    )


def _constant(value: int | float | bool | str) -> int | bool | str:
    return float_bits(value) if isinstance(value, float) else value


def _toolchain(engine_runner: str | None, kernels: Bundle | None) -> Toolchain:
    if kernels is None:
        return Toolchain(
            jax=jax.__version__,
            jaxlib=jaxlib.__version__,
            module_format="xla_cpu",
            ptxas=None,
            kernel_manifest=None,
            engine_runner=engine_runner or CPU_ENGINE_RUNNER,
        )
    # Of the bundle and not of this process, which may only read it.
    return Toolchain(
        jax=SEALING_JAX,
        jaxlib=SEALING_JAX,
        module_format=MODULE_FORMAT,
        ptxas=kernels.ptxas,
        kernel_manifest=kernels.sha256,
        engine_runner=engine_runner or SM90_ENGINE_RUNNER,
    )


def _semantics(policy: Policy, temperature: float) -> Semantics:
    return Semantics(
        temperature=float_bits(temperature),
        sampling_filters="none",
        sampling_rng="splitmix64_inverse_cdf",
        nan_policy="refuse",
        padded_vocab_size=policy.config.vocab_size,
        padding_logit="-inf",
        vocabulary_leaves=VOCABULARY_LEAVES,
        split_k_leaves=policy.config.leaves,
        rope_table_digest=rope_table_digest(np.asarray(policy.buffers["rope_table"])),
        parameter_dtype=policy.dtype,
        compute_dtype=policy.dtype,
        kv_cache_dtype=policy.dtype,
        head_operand_dtype=policy.dtype,
        head_output_dtype="float32",
        quantization="none",
        adapters="none",
    )


def _claims(policy: Policy) -> Claims:
    degrees = _degrees(policy)
    return Claims(
        topology=tuple(
            InvariantClaim(axis=axis, degrees=degrees[axis], gate=MESH_GATE)
            if axis in degrees
            else PinnedClaim(axis=axis, degree=1, gate=PARITY_GATE)
            for axis in AXES
        ),
        device_kinds=(CPU_KIND,),
        state="proved",
        invalidated_by=("device_kind", "instruction_set", "toolchain"),
        tolerances=FrozenMap({}),
    )


def _degrees(policy: Policy) -> dict[str, tuple[int, ...]]:
    """By axis, those at which a gate can compare this policy with one device."""
    return {"dp": PROVED_DEGREES, "fsdp": tuple(degree for degree in PROVED_DEGREES if fits_fsdp(policy, degree))}


def _unproved_claims() -> Claims:
    """Every axis pinned to 1 by a gate that is still to run: a fresh bundle has been on no card."""
    return Claims(
        topology=topology(SM90_GATE),
        device_kinds=(),
        state="unproved",
        invalidated_by=("device_kind", "kernels", "toolchain"),
        tolerances=FrozenMap({}),
    )
