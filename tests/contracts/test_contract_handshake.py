"""The handshake passes for an engine that does what the contract says and refuses every other one by name."""

import pytest
from contract_samples import (
    CASES,
    DIGEST,
    OTHER_DIGEST,
    entry,
    qwen3_on_hopper,
    report,
    smollm2,
    with_value,
)

from contracts import check_kernels, handshake
from contracts.errors import (
    HandshakeRefused,
    IdentityMismatch,
    MeshNotClaimed,
    ToolchainMismatch,
    UnknownCase,
    WeightDigestMismatch,
)


@pytest.mark.parametrize("contract", [smollm2(), qwen3_on_hopper()], ids=["smollm2", "qwen3"])
def test_an_engine_that_follows_the_contract_is_accepted(contract):
    handshake(contract, report(contract), trainer_mesh={"dp": 1}, weight_digest="0011223344556677")


def test_both_meshes_must_be_claimed_but_need_not_be_equal():
    contract = qwen3_on_hopper()
    handshake(contract, report(contract, mesh={"tp": 4}), trainer_mesh={"fsdp": 8})
    with pytest.raises(MeshNotClaimed, match="tp=8"):
        handshake(contract, report(contract, mesh={"tp": 8}), trainer_mesh={"fsdp": 8})
    with pytest.raises(MeshNotClaimed, match="fsdp=2"):
        handshake(contract, report(contract, mesh={"tp": 4}), trainer_mesh={"fsdp": 2})


def test_a_deployment_that_differs_is_accepted():
    contract = smollm2()
    elsewhere = with_value(contract, ("deployment", "notes"), "the other rack").sealed()
    assert elsewhere.identities.deployment != contract.identities.deployment
    handshake(contract, report(elsewhere))


@pytest.mark.parametrize(
    ("path", "value", "identity"),
    [
        (("semantics", "head_operand_dtype"), "float32", "numerical_policy"),
        (("semantics", "kv_cache_dtype"), "float32", "numerical_policy"),
        (("semantics", "padded_vocab_size"), 49216, "numerical_policy"),
        (("semantics", "adapters"), "merged", "numerical_policy"),
        (("model", "tokenizer_digest"), OTHER_DIGEST, "semantic"),
        (("model", "config_digest"), OTHER_DIGEST, "semantic"),
        (("toolchain", "jaxlib"), "0.10.3", "numerical_policy"),
        (("composition", 0, "version"), 2, "numerical_policy"),
    ],
)
def test_an_engine_with_another_contract_is_refused_naming_identity_field_and_values(path, value, identity):
    contract = smollm2()
    with pytest.raises(IdentityMismatch) as refusal:
        handshake(contract, report(with_value(contract, path, value).sealed()))
    assert refusal.value.field == f"identities.{identity}"
    assert str(path[-1]) in refusal.value.reason
    assert str(value) in refusal.value.reason


@pytest.mark.parametrize(
    ("case", "field", "live"),
    [
        ("10", "padded_vocab_size", 49216),
        ("12", "temperature", 0.6),
        ("17", "head_operand_dtype", "float32"),
        ("17", "head_output_dtype", "bfloat16"),
        ("20", "rope_table_digest", OTHER_DIGEST),
        ("25", "adapters", "merged"),
        ("25", "adapters", "unmerged"),
        ("27", "quantization", "fp8"),
        ("27", "compute_dtype", "float8_e4m3fn"),
        ("28", "kv_cache_dtype", "fp8_e5m2"),
        ("28", "kv_cache_dtype", "float32"),
        ("28", "compute_dtype", "float16"),
        ("28", "parameter_dtype", "float16"),
        ("29", "tokenizer_digest", OTHER_DIGEST),
    ],
)
def test_an_engine_that_runs_something_else_than_its_contract_is_refused(case, field, live):
    """Cases of public bug reports where a setting on one side only was accepted."""
    contract = smollm2()
    with pytest.raises(HandshakeRefused) as refusal:
        handshake(contract, report(contract, **{field: live}))
    assert refusal.value.field.endswith(f".{field}")
    assert str(live) in str(refusal.value.found)
    if case == "27":
        assert "couples the requests of a batch" in refusal.value.reason


def test_one_side_with_adapters_merged_and_the_other_unmerged_is_refused():
    """Case 25."""
    merged = with_value(smollm2(), ("semantics", "adapters"), "merged").sealed()
    handshake(merged, report(merged))
    with pytest.raises(HandshakeRefused, match=r"semantics\.adapters: found engine runs unmerged"):
        handshake(merged, report(merged, adapters="unmerged"))


def test_contracts_of_two_architectures_are_never_compared():
    other = smollm2().replaced(
        composition=tuple(item.model_copy(update={"arch": "cpu-avx512"}) for item in smollm2().composition)
    )
    with pytest.raises(HandshakeRefused, match=r"cpu-avx512.*cpu-avx2"):
        handshake(smollm2(), report(other))


def test_an_edited_contract_is_refused_on_either_side():
    edited = with_value(smollm2(), ("semantics", "vocabulary_leaves"), 4)
    with pytest.raises(IdentityMismatch, match="changed by hand"):
        handshake(edited, report(smollm2()))
    with pytest.raises(IdentityMismatch, match="changed by hand"):
        handshake(smollm2(), report(smollm2()).model_copy(update={"contract": edited}))


@pytest.mark.parametrize(("field", "live"), [("engine_runner", "vllm_v2"), ("jax", "0.11.2"), ("ptxas", "13.0")])
def test_another_runner_or_toolchain_than_the_gates_ran_with_is_refused(field, live):
    contract = smollm2()
    toolchain = contract.toolchain.model_copy(update={field: live})
    with pytest.raises(ToolchainMismatch, match=rf"toolchain\.{field}"):
        handshake(contract, report(contract, toolchain=toolchain))


def test_a_card_that_no_gate_ran_on_is_refused():
    with pytest.raises(ToolchainMismatch, match="isojax verify"):
        handshake(qwen3_on_hopper(), report(qwen3_on_hopper(), device_kind="NVIDIA H20"))


@pytest.mark.parametrize("held", [None, "ffffffffffffffff"])
def test_an_engine_with_other_weights_is_refused(held):
    contract = smollm2()
    with pytest.raises(WeightDigestMismatch):
        handshake(contract, report(contract, weight_digest=held), weight_digest="0011223344556677")


@pytest.mark.parametrize("what", ["installed", "served"])
@pytest.mark.parametrize(
    ("record", "names"),
    [
        (
            {"engine_decode": {"matmul": (DIGEST,), "attention": (DIGEST,)}},
            ["attention beyond", "paged_attention missing"],
        ),
        ({"engine_decode": {"matmul": (DIGEST,)}}, ["paged_attention missing"]),
        ({"engine_decode": {"matmul": ("0" * 64,), "paged_attention": (DIGEST,)}}, ["engine_decode.matmul", "0" * 64]),
        ({"engine_decode": {"matmul": (), "paged_attention": (DIGEST,)}}, ["no kernel digest"]),
    ],
)
def test_kernels_that_the_contract_does_not_name_are_refused(what, record, names):
    contract = qwen3_on_hopper()
    with pytest.raises(HandshakeRefused) as refusal:
        handshake(contract, report(contract, **{what: record}))
    assert refusal.value.field.startswith(f"{what}.engine_decode")
    for name in names:
        assert name in str(refusal.value)


def test_one_of_several_named_kernels_may_have_run_alone():
    contract = qwen3_on_hopper()
    check_kernels(contract, {"engine_decode": {"matmul": (DIGEST,), "paged_attention": (OTHER_DIGEST,)}}, what="served")


def test_a_kernel_digest_where_the_contract_has_none_is_refused():
    with pytest.raises(HandshakeRefused, match="no sealed kernel"):
        check_kernels(
            smollm2(),
            {"trainer_fwd": {"matmul": (DIGEST,), "rms_norm": (), "attention": ()}},
            what="served",
        )


def test_a_served_case_that_is_unknown_or_not_covered_is_refused():
    with pytest.raises(UnknownCase, match="engine_speculative"):
        check_kernels(smollm2(), {"engine_speculative": {}}, what="served")
    trainer_only = smollm2().replaced(cases=CASES[:2], composition=(entry("matmul", CASES[:2]),))
    with pytest.raises(UnknownCase, match=r"served\.engine_decode"):
        check_kernels(trainer_only, {"engine_decode": {"matmul": ()}}, what="served")


def test_an_engine_that_has_not_run_yet_is_accepted_before_its_first_forward():
    handshake(smollm2(), report(smollm2(), installed={}, served={}))
