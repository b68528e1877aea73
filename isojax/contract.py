"""Build the execution contract of a policy: what it is made of, read from the policy and its audit."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
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
)
from contracts.errors import BadConfig
from isojax.audit import AuditReport, RegionCall, audit
from isojax.cpu_arch import cpu_arch
from isojax.mesh import PROVED_DEGREES, fits_fsdp
from isojax.policy.batch import PackedBatch
from isojax.policy.config import PolicyConfig, config_digest
from isojax.policy.policy import Policy
from isojax.policy.rope import rope_table_digest
from isojax.weights.tokenizer import tokenizer_digest
from pallas_kernels import REGIONS
from pallas_kernels.lm_head.spec import LEAVES as VOCABULARY_LEAVES

TRAINER_CASES, ENGINE_CASES = CASES[:2], CASES[2:]
MESH_GATE = "tests/isojax/test_mesh.py::test_a_sharded_policy_equals_one_device"
PARITY_GATE = "tests/parity"
# A region of the contract whose owner differs between trainer and engine, by (trainer's, engine's) primitive.
_PAIRS = {"attention": ("attention", "paged_attention"), "log_probs": ("token_log_probs", "log_prob_rows")}


def build_contract(
    policy: Policy,
    *,
    tokenizer: Mapping[str, bytes],
    arch: str = "cpu",
    temperature: float = 1.0,
    engine_runner: str = "vllm_v1",
) -> ExecutionContract:
    """The sealed contract of a policy on this machine.

    tokenizer: the tokenizer's files by name, empty for a policy that knows tokens only. temperature: T of
    log_softmax(logits / T). The composition is what the audit finds in the policy's own forward, with the parameters of
    every call, so a policy with stray arithmetic has no contract.

    Raises `UncoveredArithmetic` for such a policy and `BadConfig` for an architecture without kernels or a temperature
    that float32 does not hold.
    """
    temperature = check_temperature(temperature)
    if arch != "cpu":
        raise BadConfig(
            field="arch", found=arch, allowed=["cpu"], reason="No sealed kernels for it are in this installation."
        )
    config = policy.config
    return ExecutionContract(
        schema_version=1,
        model=_model(config, tokenizer_digest(tokenizer)),
        cases=CASES,
        composition=tuple(_composition(policy, cpu_arch())),
        semantics=_semantics(policy, temperature),
        claims=_claims(policy),
        toolchain=Toolchain(
            jax=jax.__version__,
            jaxlib=jaxlib.__version__,
            module_format="xla_cpu",
            ptxas=None,
            engine_runner=engine_runner,
        ),
    ).sealed()


def audit_policy(policy: Policy, tokens: int = 8) -> tuple[AuditReport, AuditReport]:
    """Audit the trainer's forward (sampled tokens) and the engine's (hidden states and full rows), abstractly."""
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    batch = PackedBatch(ids, ids, ids, ids, jax.ShapeDtypeStruct((tokens,), jnp.bool_))
    params = policy.parameter_shapes
    temperature = jax.ShapeDtypeStruct((), jnp.float32)

    def rows(params, buffers, batch, temperature):
        hidden = policy.hidden(params, buffers, batch.tokens, batch.positions, batch.segment_ids)
        return policy.head_rows(params, hidden, temperature)

    arguments = (params, policy.buffers, batch, temperature)
    return audit(policy.score, *arguments), audit(rows, *arguments)


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


def _composition(policy: Policy, arch: str) -> Iterable[CompositionEntry]:
    trainer, engine = audit_policy(policy)
    paired = {primitive for pair in _PAIRS.values() for primitive in pair}
    # The two forwards share everything up to the head.
    for primitive in sorted(set(trainer.sequence) | set(engine.sequence)):
        if primitive not in paired:
            yield _entry(primitive, primitive, CASES, trainer.calls, arch)
    for region, (trained, served) in _PAIRS.items():
        yield _entry(region, trained, TRAINER_CASES, trainer.calls, arch, gate=PARITY_GATE)
        # The engine's graph takes the paged binding at the calls that the policy makes to the packed one.
        source = [call._replace(region=served) if call.region == trained else call for call in engine.calls]
        yield _entry(region, served, ENGINE_CASES, source, arch, gate=PARITY_GATE)


def _entry(
    region: str,
    primitive: str,
    cases: tuple[Case, ...],
    calls: Iterable[RegionCall],
    arch: str,
    gate: str | None = None,
) -> CompositionEntry:
    declared = REGIONS[primitive]
    parameters = [call.parameters for call in calls if call.region == primitive]
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
        kernel_digests=FrozenMap({}),
        gate=gate,
    )


def _constant(value: int | float | bool | str) -> int | bool | str:
    return float_bits(value) if isinstance(value, float) else value


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
    degrees = {
        "dp": PROVED_DEGREES,
        "fsdp": tuple(degree for degree in PROVED_DEGREES if fits_fsdp(policy, degree)),
    }
    return Claims(
        topology=tuple(
            InvariantClaim(axis=axis, degrees=degrees[axis], gate=MESH_GATE)
            if axis in degrees
            else PinnedClaim(axis=axis, degree=1, gate=PARITY_GATE)
            for axis in AXES
        ),
        device_kinds=(jax.local_devices(backend="cpu")[0].device_kind,),
        state="proved",
        invalidated_by=("device_kind", "instruction_set", "toolchain"),
        tolerances=FrozenMap({}),
    )
