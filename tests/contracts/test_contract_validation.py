"""A contract that contradicts itself, hides an owner or names a claim without a gate cannot be built."""

import pytest
from contract_samples import DIGEST, ENGINE, TRAINER, entry, qwen3_on_hopper, smollm2, with_value
from pydantic import ValidationError

from contracts import CASES, Claims, CompositionEntry, InvariantClaim, PinnedClaim, Semantics, check_case, topology
from contracts.errors import BadContract, IdentityMismatch, ToolchainMismatch, UnknownCase


def with_entries(*entries):
    return smollm2().replaced(composition=entries)


def test_a_region_without_an_owner_in_one_case_is_refused():
    with pytest.raises(BadContract, match=r"composition\.matmul: found 0 owners in engine_decode"):
        with_entries(entry("matmul", CASES[:3]))


def test_a_region_with_two_owners_in_one_case_is_refused():
    with pytest.raises(BadContract, match=r"composition\.matmul: found 2 owners in engine_prefill"):
        with_entries(entry("matmul"), entry("matmul", ("engine_prefill",), impl_id="fast_matmul"))


def test_an_entry_for_a_case_that_the_contract_does_not_cover_is_refused():
    with pytest.raises(BadContract, match="owns a case that the contract does not cover"):
        smollm2().replaced(cases=TRAINER)


@pytest.mark.parametrize("missing", [0, 1])
def test_different_owners_on_trainer_and_engine_must_both_carry_a_gate(missing):
    gates = ["tests/parity", "tests/parity"]
    gates[missing] = None
    entries = [
        entry("attention", TRAINER, gate=gates[0]),
        entry("attention", ENGINE, impl_id="paged_attention", gate=gates[1]),
    ]
    with pytest.raises(BadContract, match=r"composition\.attention\.gate: found none"):
        with_entries(*entries)


@pytest.mark.parametrize(
    "other", [{"version": 2}, {"constants": {"split": 1024}}, {"kernel_digests": {"decode": DIGEST}}]
)
def test_an_asymmetry_in_anything_but_the_implementation_needs_a_gate_too(other):
    with pytest.raises(BadContract, match="only a gate shows that they agree"):
        with_entries(entry("attention", TRAINER), entry("attention", ENGINE, gate=None, **other))


def test_one_implementation_in_all_cases_needs_no_gate():
    assert with_entries(entry("matmul", gate=None)).owner("matmul", "engine_decode").gate is None


def test_one_arithmetic_split_over_two_entries_is_refused_because_it_would_have_two_identities():
    with pytest.raises(BadContract, match="differ only in their cases"):
        with_entries(entry("matmul", TRAINER), entry("matmul", ENGINE, gate="tests/other"))


@pytest.mark.parametrize("region", ["*", "matmul*", "any", ""])
def test_entries_are_explicit_there_is_no_wildcard(region):
    if region == "any":
        with pytest.raises(BadContract, match="entries are explicit"):
            with_entries(entry("any")).owner("matmul", "trainer_fwd")
    else:
        with pytest.raises(ValidationError, match="region"):
            entry(region)


@pytest.mark.parametrize("cases", [(), ("engine_decode", "engine_decode"), ("engine_speculative",)])
def test_cases_are_listed_once_each_and_known(cases):
    with pytest.raises(ValidationError, match="cases"):
        entry("matmul", cases)


def test_an_unknown_log_probability_path_is_refused_by_name():
    with pytest.raises(UnknownCase, match="engine_speculative"):
        check_case("engine_speculative")
    with pytest.raises(UnknownCase, match="engine_speculative"):
        smollm2().owner("matmul", "engine_speculative")


def test_a_case_outside_of_this_contract_is_refused_although_others_know_it():
    trainer_only = smollm2().replaced(cases=TRAINER, composition=(entry("matmul", TRAINER),))
    with pytest.raises(UnknownCase, match="engine_decode"):
        trainer_only.owner("matmul", "engine_decode")


def test_architectures_do_not_mix_and_a_cpu_contract_names_its_instruction_set():
    with pytest.raises(BadContract, match=r"cpu-avx2, cpu-avx512"):
        with_entries(entry("matmul"), entry("swiglu", arch="cpu-avx512"))
    with pytest.raises(ValidationError, match="arch"):
        entry("matmul", arch="cpu")


def test_a_gpu_region_without_kernel_digests_is_refused():
    with pytest.raises(BadContract, match=r"composition\.matmul\.kernel_digests: found none"):
        with_entries(entry("matmul", arch="sm90"))


def test_sealed_kernels_and_their_manifest_belong_together():
    for contract, manifest in ((smollm2(), DIGEST), (qwen3_on_hopper(), None)):
        toolchain = contract.toolchain.model_copy(update={"kernel_manifest": manifest})
        with pytest.raises(BadContract, match=r"toolchain\.kernel_manifest"):
            contract.replaced(toolchain=toolchain)


def test_only_an_unproved_claim_may_name_no_device():
    claims = smollm2().claims.model_copy(update={"device_kinds": ()})
    with pytest.raises(BadContract, match=r"claims\.device_kinds: found none"):
        smollm2().replaced(claims=claims)
    unproved = smollm2().replaced(claims=claims.model_copy(update={"state": "unproved"}))
    with pytest.raises(ToolchainMismatch, match="no device yet"):
        unproved.check_device_kind("cpu")


@pytest.mark.parametrize(
    "dtype", ["parameter_dtype", "compute_dtype", "kv_cache_dtype", "head_operand_dtype", "head_output_dtype"]
)
@pytest.mark.parametrize("value", ["fp8_e4m3", "float8_e5m2"])
def test_float8_is_refused_with_the_reason(dtype, value):
    """Case 27: a per-tensor dynamic scale couples the requests of a batch."""
    with pytest.raises(ValidationError, match="every row has a scale of its own"):
        Semantics(**{**smollm2().semantics.model_dump(), dtype: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("compute_dtype", "float16"), ("sampling_filters", "top_p"), ("nan_policy", "mask"), ("temperature", 0.0),
     ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", -1.0), ("temperature", True),
     ("temperature", "1.0"), ("padded_vocab_size", 49152.0), ("padded_vocab_size", "49152"), ("vocabulary_leaves", 0),
     ("rope_table_digest", "abc")],
)  # fmt: skip
def test_semantics_that_isojax_does_not_implement_cannot_be_written(field, value):
    with pytest.raises(ValidationError, match=field):
        Semantics(**{**smollm2().semantics.model_dump(), field: value})


def test_padding_never_removes_tokens():
    """Case 10."""
    semantics = smollm2().semantics.model_copy(update={"padded_vocab_size": 49151})
    with pytest.raises(BadContract, match=r"padded_vocab_size: found 49151; allowed: at least model.vocab_size, 49152"):
        smollm2().replaced(semantics=semantics)


def test_kv_heads_divide_the_query_heads():
    with pytest.raises(BadContract, match="num_kv_heads"):
        smollm2().replaced(model=smollm2().model.model_copy(update={"num_kv_heads": 2}))


def test_a_claim_names_its_gate():
    for gate in ("", None):
        with pytest.raises(ValidationError, match="gate"):
            PinnedClaim(axis="tp", degree=1, gate=gate)
    with pytest.raises(ValidationError, match="gate"):
        InvariantClaim(axis="tp", degrees=(1, 2))


@pytest.mark.parametrize("degrees", [(), (0,), (2, 2), (1.5,), (True,)])
def test_claimed_degrees_are_distinct_positive_integers(degrees):
    with pytest.raises(ValidationError, match="degrees"):
        InvariantClaim(axis="tp", degrees=degrees, gate="g")


@pytest.mark.parametrize("drop", [1, -1])
def test_every_axis_has_exactly_one_claim(drop):
    claims = topology("g")
    claims = claims[1:] if drop == 1 else (*claims, claims[0])
    with pytest.raises(BadContract, match=r"claims\.topology"):
        Claims(topology=claims, device_kinds=("cpu",), state="proved", invalidated_by=("toolchain",), tolerances={})


def test_a_claim_about_a_mesh_that_cannot_exist_is_refused():
    claims = smollm2().claims.model_copy(update={"topology": topology("g", {"tp": (1, 2)})})
    with pytest.raises(BadContract, match=r"claims\.topology\.tp: found 2.*9 heads and 3 KV heads"):
        smollm2().replaced(claims=claims)


def test_empty_tolerances_mean_exact():
    assert smollm2().claims.exact
    assert not qwen3_on_hopper().claims.exact


def test_a_field_changed_after_sealing_is_caught_by_the_identity_it_rotates():
    changed = with_value(smollm2(), ("semantics", "vocabulary_leaves"), 4)
    with pytest.raises(IdentityMismatch, match=r"identities\.numerical_policy"):
        changed.validate_identities()
    assert changed.sealed().validate_identities() != smollm2().identities
    with pytest.raises(IdentityMismatch, match=r"identities\.deployment"):
        with_value(smollm2(), ("deployment", "notes"), "edited").validate_identities()


def test_an_unsealed_contract_has_no_valid_identities():
    with pytest.raises(IdentityMismatch, match="not sealed"):
        smollm2().model_copy(update={"identities": None}).validate_identities()


def test_nothing_can_be_changed_in_place():
    contract = qwen3_on_hopper()
    with pytest.raises(ValidationError):
        contract.semantics.temperature = 2.0
    with pytest.raises(TypeError):
        contract.composition[0].constants["leaves"] = 8
    assert hash(contract) == hash(qwen3_on_hopper())


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="tile"):
        CompositionEntry(**entry("matmul").model_dump(), tile=128)


@pytest.mark.parametrize("value", [2**53, None, (1,), "f64:1"])
def test_constants_are_exact_scalars(value):
    with pytest.raises(ValidationError, match="constants"):
        entry("matmul", constants={"leaves": value})


def test_another_toolchain_is_refused_by_field_and_only_for_the_fields_given():
    contract = smollm2()
    contract.check_toolchain({"jax": "0.10.2", "ptxas": None})
    with pytest.raises(ToolchainMismatch, match=r"toolchain\.jaxlib: found '0\.10\.3'; allowed: '0\.10\.2'"):
        contract.check_toolchain({"jaxlib": "0.10.3"})
    with pytest.raises(ToolchainMismatch, match="no such toolchain field"):
        contract.check_toolchain({"torch": "2.13.0"})


def test_a_card_that_no_gate_ran_on_is_told_to_verify_first():
    with pytest.raises(ToolchainMismatch, match="run `isojax verify`") as refusal:
        qwen3_on_hopper().check_device_kind("NVIDIA H20")
    assert "NVIDIA H200" in str(refusal.value)
