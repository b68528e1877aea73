"""The handshake before the first rollout: trainer and engine prove to each other that they run one contract."""

from collections.abc import Mapping

from contracts.cases import check_case
from contracts.contract import ExecutionContract
from contracts.diff import diff
from contracts.engine_report import EngineReport
from contracts.errors import HandshakeRefused, IdentityMismatch, UnknownCase, WeightDigestMismatch
from contracts.field_types import is_float8
from contracts.float_bits import bits_float

# What the engine really does, against what the contract says, and what goes wrong otherwise. The field names are those
# of EngineReport.
_LIVE_SETTINGS = (
    ("model", "tokenizer_digest", "Another tokenizer or chat template turns the same text into other tokens."),
    ("semantics", "rope_table_digest", "Another RoPE table rotates queries and keys by other angles."),
    ("semantics", "padded_vocab_size", "Padding on one side only changes the leaves of the log-softmax tree."),
    ("semantics", "parameter_dtype", "Weights in another dtype are other weights."),
    ("semantics", "compute_dtype", "Activations would be rounded on one side and not on the other."),
    ("semantics", "kv_cache_dtype", "Cached keys and values would differ from those that the trainer computes."),
    ("semantics", "head_operand_dtype", "A head in another dtype on one side only gives other logits."),
    ("semantics", "head_output_dtype", "Logits that one side rounds and the other does not are not equal."),
    ("semantics", "quantization", "Quantised arithmetic on one side rounds where the other does not."),
    ("semantics", "adapters", "Merging an adapter rounds the weights; running it beside them does not."),
)
_FLOAT8 = " A per-tensor FP8 scale also couples the requests of a batch; FP8 is refused until scales are per row."


def handshake(
    trainer: ExecutionContract,
    engine: EngineReport,
    *,
    trainer_mesh: Mapping[str, int] | None = None,
    weight_digest: str | None = None,
) -> None:
    """Refuse unless the engine runs the trainer's contract. Returns None when every check passes.

    Compares the identities `semantic` and `numerical_policy` (not `deployment`), the engine's live settings, mesh,
    device kind and toolchain, and the kernels that it installed and served. `trainer_mesh` and `weight_digest` are
    checked when given; the two meshes need not be equal, both must be claimed.

    Raises `IdentityMismatch`, `HandshakeRefused`, `MeshNotClaimed`, `ToolchainMismatch`, `UnknownCase` or
    `WeightDigestMismatch`, each naming the field, both values and the reason.
    """
    _same_identities(trainer, engine.contract)
    _same_settings(trainer, engine)
    trainer.check_device_kind(engine.device_kind)
    trainer.check_toolchain(engine.toolchain.model_dump())
    if trainer_mesh is not None:
        trainer.check_mesh(trainer_mesh)
    trainer.check_mesh(engine.mesh)
    check_kernels(trainer, engine.installed, what="installed")
    check_kernels(trainer, engine.served, what="served")
    if weight_digest is not None and engine.weight_digest != weight_digest:
        raise WeightDigestMismatch(
            field="weight_digest",
            found=f"engine {engine.weight_digest or 'without synced weights'}",
            allowed=f"trainer's {weight_digest}",
            reason="The engine does not hold the trainer's weights; sync before generating.",
        )


def check_kernels(
    contract: ExecutionContract, record: Mapping[str, Mapping[str, tuple[str, ...]]], *, what: str
) -> None:
    """Compare kernels that were installed or served with the contract. `record`: case -> region primitive -> digests.

    A case that is absent has not run; list a served case once a whole forward, log-probabilities included, is through.
    A case that is present must list every primitive that the contract gives it, no other one, and no kernel digest that
    the contract does not have. Raises `UnknownCase` or `HandshakeRefused`.
    """
    for case, primitives in record.items():
        if check_case(case) not in contract.cases:
            raise UnknownCase(
                field=f"{what}.{case}",
                found=case,
                allowed=", ".join(contract.cases),
                reason="The contract does not cover this log-probability path.",
            )
        expected: dict[str, set[str]] = {}
        for entry in contract.composition:
            if case in entry.cases:
                expected.setdefault(entry.impl_id, set()).update(entry.kernel_digests.values())
        if primitives.keys() != expected.keys():
            raise HandshakeRefused(
                field=f"{what}.{case}",
                found=_names(primitives.keys() - expected.keys(), "beyond the contract")
                + _names(expected.keys() - primitives.keys(), "missing"),
                allowed=", ".join(sorted(expected)),
                reason="Another implementation than the contract's owner computes a region in this case.",
            )
        for name, digests in primitives.items():
            unknown = sorted(set(digests) - expected[name])
            if unknown or (expected[name] and not digests):
                raise HandshakeRefused(
                    field=f"{what}.{case}.{name}",
                    found=", ".join(unknown) or "no kernel digest",
                    allowed=", ".join(sorted(expected[name])) or "no sealed kernel",
                    reason=f"The kernel that was {what} is not one that the contract names.",
                )


def _names(names: set[str], what: str) -> str:
    return f"{', '.join(sorted(names))} {what}; " if names else ""


def _same_identities(trainer: ExecutionContract, engine: ExecutionContract) -> None:
    trainer_identities, engine_identities = trainer.validate_identities(), engine.validate_identities()
    if trainer.arch != engine.arch:
        raise HandshakeRefused(
            field="composition.arch",
            found=f"engine {engine.arch}",
            allowed=f"trainer's {trainer.arch}",
            reason="Contracts of different architectures are never compared; their bits differ by design.",
        )
    for name in ("semantic", "numerical_policy"):
        ours, theirs = getattr(trainer_identities, name), getattr(engine_identities, name)
        if ours != theirs:
            changed = [item for item in diff(trainer, engine) if name in item.rotates]
            raise IdentityMismatch(
                field=f"identities.{name}",
                found=f"engine {theirs}",
                allowed=f"trainer's {ours}",
                reason="The contracts differ in "
                + "; ".join(f"{item.field} (trainer {item.left}, engine {item.right})" for item in changed)
                + ".",
            )


def _same_settings(trainer: ExecutionContract, engine: EngineReport) -> None:
    for section, name, reason in _LIVE_SETTINGS:
        declared, live = getattr(getattr(trainer, section), name), getattr(engine, name)
        if live != declared:
            float8 = _FLOAT8 if is_float8(live) else ""
            raise HandshakeRefused(
                field=f"{section}.{name}",
                found=f"engine runs {live}",
                allowed=f"the contract's {declared}",
                reason=reason + float8,
            )
    if engine.temperature != trainer.semantics.temperature:
        raise HandshakeRefused(
            field="semantics.temperature",
            found=f"engine runs {bits_float(engine.temperature)}",
            allowed=f"the contract's {bits_float(trainer.semantics.temperature)}",
            reason="Log-probabilities are log_softmax(logits / T) at one T on both sides.",
        )
