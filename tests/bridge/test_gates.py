"""The gates of sealed kernels run whole on the CPU forms: they pass, and each fails where its claim is false."""

import dataclasses

import pytest
import torch
from gate_samples import CONFIG, SHAPES, bundle, cpu_card, cpu_form

import pallas_kernels as pk
from bridge.gates import sm90_suite, trainer
from bridge.gates.bits import check_all, require_caught, require_equal
from bridge.gates.families import families, tokens_of
from bridge.gates.faults import Fault, faults_of, faulty_call
from bridge.gates.histories import Chunk, decode_steps, lengths_around, packed_batches, paged_steps
from bridge.gates.operands import hazardous_rows
from bridge.gates.suite import CHECKS, planted_calls
from contracts.errors import DifferenceFound, ToolchainMismatch
from isojax.evidence.gates import run_gates
from pallas_kernels.attention.spec import DEFAULT_SPLIT

pytestmark = pytest.mark.long_file(80)

GATES = dict(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_a_gate_passes_over_forms_that_are_right_and_catches_its_own_faults(name):
    assert "every planted fault caught" in GATES[name](cpu_card())


def _lying(region: str, spoil, tokens: int | None = None):
    """CPU forms, but for one region, whose results a fault of the form itself changes."""

    def make(program):
        run = cpu_form(program)
        if program.region != region or tokens not in (None, tokens_of(program)):
            return run
        return lambda *operands: tuple(spoil(result.clone()) for result in run(*operands))

    return make


def _last_bits(result: torch.Tensor) -> torch.Tensor:
    """The lowest bit of every value of the last row flipped."""
    result.view({2: torch.int16, 4: torch.int32}[result.element_size()])[-1] ^= 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "region", "tokens"),
    [
        ("row_invariance", "gated_matmul", 8),
        ("row_invariance", "log_prob_rows", 16),
        ("attention_bindings", "paged_attention", 16),
        ("attention_bindings", "paged_decode_attention", 8),
        ("attention_bindings", "attention", 128),
        ("fused_head", "log_prob_rows", 8),
        ("trainer_and_engine", "add_rms_norm", 128),
    ],
)
def test_the_last_bit_in_one_bucket_fails_the_gate_and_is_named(name, region, tokens):
    # Padding is looked at even while the packed form's results are gathered, before the gate's own parts.
    with pytest.raises(DifferenceFound, match=f"{name}|packed padding") as failure:
        GATES[name](cpu_card(_lying(region, _last_bits, tokens)))
    assert "differ" in str(failure.value)


@pytest.mark.slow
def test_a_packed_batch_too_short_for_a_split_in_two_gets_no_such_fault():
    # The trainer's shortest batch holds no more keys than half a split has; a longer one does.
    config = dataclasses.replace(CONFIG, max_position=256, attention_split=256)
    shapes = dataclasses.replace(SHAPES, token_buckets=(64,), trainer_tokens=(128, 256), max_context=256)
    found = GATES["attention_bindings"](cpu_card(sealed=bundle(config, shapes)))
    assert "129, 248 tokens" in found


def _gated_alone(make=cpu_form):
    card = cpu_card(make)
    programs = tuple(program for program in card.bundle.programs if program.region == "gated_matmul")
    return dataclasses.replace(card, bundle=dataclasses.replace(card.bundle, programs=programs))


def test_a_region_that_is_others_under_gradients_is_compared_with_them(monkeypatch):
    def without_a_round(x, w):
        return pk.cast(pk.swiglu(pk.matmul(x, w, out_dtype="float32")), dtype="bfloat16")

    assert "3 calls of 1 regions" in GATES["trainer_and_engine"](_gated_alone())
    monkeypatch.setitem(trainer.DIFFERENTIATED, "gated_matmul", without_a_round)
    with pytest.raises(DifferenceFound, match=r"1 of 3 parts fail: gated_matmul .* under gradients: .* differ"):
        GATES["trainer_and_engine"](_gated_alone())


def test_a_trainers_token_count_must_be_there_to_compare_with():
    card = _gated_alone()
    small = tuple(program for program in card.bundle.programs if tokens_of(program) < 128)
    with pytest.raises(DifferenceFound, match="no token count of a trainer's"):
        GATES["trainer_and_engine"](dataclasses.replace(card, bundle=dataclasses.replace(card.bundle, programs=small)))


@pytest.mark.slow
def test_results_that_drift_from_launch_to_launch_fail_repeatability():
    seen = iter(range(10**6))

    def drifting(result: torch.Tensor) -> torch.Tensor:
        return _last_bits(result) if next(seen) % 3 else result

    with pytest.raises(DifferenceFound, match="swiglu, launch"):
        GATES["repeatability"](cpu_card(_lying("swiglu", drifting)))


@pytest.mark.slow
@pytest.mark.parametrize("region", sorted({program.region for program in bundle().programs}))
def test_a_value_beyond_its_roundings_fails_the_reference(region):
    def off(result: torch.Tensor) -> torch.Tensor:
        result.view(len(result), -1)[0] *= 1.05
        return result

    with pytest.raises(DifferenceFound, match=region):
        GATES["reference"](cpu_card(_lying(region, off)))


@pytest.mark.slow
def test_a_wrong_second_split_fails_the_reference_where_the_first_one_is_long():
    """The packed form alone, whose splits of 1024 positions are longer than the history that faults are planted in."""

    def off(result: torch.Tensor) -> torch.Tensor:
        result[DEFAULT_SPLIT:] *= 1.05
        return result

    config = dataclasses.replace(CONFIG, max_position=2048)
    sealed = bundle(config, dataclasses.replace(SHAPES, trainer_tokens=(2048,), max_context=1280))
    packed = tuple(program for program in sealed.programs if program.region == "attention")
    card = cpu_card(_lying("attention", off), sealed=dataclasses.replace(sealed, programs=packed))
    with pytest.raises(DifferenceFound, match=r"values too far, at \(1024, "):
        GATES["reference"](card)


def test_programs_are_grouped_by_all_but_their_tokens():
    found = families(bundle().programs)
    assert sum(len(family.programs) for family in found) == len(bundle().programs)
    for family in found:
        assert [tokens_of(program) for program in family.programs] == sorted(map(tokens_of, family.programs))
        assert len({program.constants for program in family.programs}) == 1
    buckets = {
        family.region: tuple(map(tokens_of, family.programs)) for family in found if "attention" in family.region
    }
    assert buckets == {
        "attention": SHAPES.trainer_tokens,
        "paged_attention": SHAPES.token_buckets,
        "paged_decode_attention": SHAPES.decode_buckets,
    }
    (norms,) = [family for family in found if family.region == "rms_norm"]
    assert tuple(map(tokens_of, norms.programs)) == (*SHAPES.token_buckets, *SHAPES.trainer_tokens)


def test_every_region_has_a_fault_and_every_fault_of_constants_is_another_call():
    for family in families(bundle().programs):
        faults = faults_of(family.largest, 10**6)
        assert faults
        assert any(fault.coarse for fault in faults)
    calls = planted_calls(bundle())
    assert len(calls) == len(set(calls)) > 0
    sealed = {(program.region, program.constants) for program in bundle().programs}
    assert not {(call.region, call.parameters) for call in calls if call.region != "matmul"} & sealed


def test_a_fault_changes_its_program_alone():
    card = cpu_card(lambda program: lambda *operands: (torch.tensor(program.constants[0][1]),))
    norms = next(family for family in families(bundle().programs) if family.region == "rms_norm")
    launch = Fault("another epsilon", (("eps", 1.0),)).launch(card, norms.smallest)
    operands = dict.fromkeys(("x", "w"), torch.zeros(1))
    assert float(launch(norms.smallest, operands)[0]) == 1.0
    assert float(launch(norms.largest, operands)[0]) == pytest.approx(1e-6)
    assert faulty_call(norms.smallest, Fault("", (("eps", 1.0),))).parameters == (("eps", 1.0),)


def test_rows_hold_every_hazard_and_a_missing_one_is_refused():
    rows = hazardous_rows((16, 256), torch.Generator().manual_seed(0))
    assert torch.isfinite(rows.float()).all()
    with pytest.raises(DifferenceFound, match="huge exponents"):
        hazardous_rows((3, 256), torch.Generator().manual_seed(0))


def test_histories_lie_around_every_boundary_and_fit_their_batches():
    assert lengths_around((16, 64), 64) == [1, 2, 7, 8, 9, 15, 16, 17, 63, 64]
    lengths = lengths_around((16, 64), 100)
    for T in (112, 256):
        batches = list(packed_batches(lengths, range(len(lengths)), T))
        assert sorted(sequence for batch in batches for sequence, _ in batch) == list(range(len(lengths)))
        for batch in batches:
            ends = [at + lengths[sequence] for sequence, at in batch]
            assert all(at % 8 == 0 for _, at in batch)
            assert all(end <= at for end, (_, at) in zip(ends[:-1], batch[1:], strict=True))
            assert ends[-1] <= T
    for T, requests in ((8, 4), (64, 2)):
        steps = list(paged_steps(lengths, T, requests))
        assert all(sum(chunk.tokens for chunk in step) <= T and len(step) <= requests for step in steps)
        chunks = [chunk for step in steps for chunk in step]
        assert all(0 <= start < stop <= lengths[sequence] for sequence, start, stop in chunks)
        last = {Chunk(number, length - 1, length) for number, length in enumerate(lengths)}
        assert last <= set(chunks)
        steps = list(decode_steps(lengths, T, requests))
        assert all(len(step) <= min(T, requests) for step in steps)
        assert all(0 <= start == stop - 1 < lengths[sequence] for step in steps for sequence, start, stop in step)
        assert last < {chunk for step in steps for chunk in step}


def test_all_failures_of_a_gate_are_told_and_an_empty_gate_fails():
    def fails():
        require_equal(torch.tensor([0.0]), torch.tensor([-0.0]), "zeros")

    with pytest.raises(DifferenceFound, match=r"2 of 3 parts fail: a: zeros.* \| c: zeros"):
        check_all("gate", [("a", fails), ("b", lambda: None), ("c", fails)])
    with pytest.raises(DifferenceFound, match="nothing to check"):
        check_all("gate", [])
    require_caught("a fault", fails)
    with pytest.raises(DifferenceFound, match="a fault: found no difference"):
        require_caught("a fault", lambda: None)


@pytest.mark.parametrize("region", ["paged_attention", "paged_decode_attention"])
def test_a_bundle_without_one_of_the_engines_forms_proves_nothing(region):
    card = cpu_card()
    others = tuple(program for program in card.bundle.programs if program.region != region)
    alone = dataclasses.replace(card, bundle=dataclasses.replace(card.bundle, programs=others))
    with pytest.raises(DifferenceFound, match=f"no {region} of"):
        GATES["attention_bindings"](alone)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_suite_refuses_by_name_before_any_gate():
    suite = sm90_suite(None)
    assert [gate.name for gate in suite.gates] == list(GATES)
    assert all(gate.claim.endswith(".") and gate.arch == "sm90" for gate in suite.gates)
    with pytest.raises(ToolchainMismatch, match="device: found no CUDA device"):
        suite.prepare()
    assert not any(result.passed for result in run_gates(suite.gates[:1]))
