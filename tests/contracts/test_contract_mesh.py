"""A mesh outside the claims is refused, with the axis, the degree, the proved degrees and the sizes in the way."""

import pytest
from contract_samples import qwen3_on_hopper, smollm2
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import AXES, parse_mesh, topology
from contracts.errors import BadConfig, BadContract, MeshNotClaimed
from contracts.mesh_check import why_uncuttable


def hopper_with_vocabulary(vocab_size, padded):
    base = qwen3_on_hopper()
    return base.model.model_copy(update={"vocab_size": vocab_size}), base.semantics.model_copy(
        update={"padded_vocab_size": padded}
    )


def test_tp_2_on_smollm2_names_tp_the_degree_and_both_head_counts():
    with pytest.raises(MeshNotClaimed) as refusal:
        smollm2().check_mesh({"tp": 2})
    text = str(refusal.value)
    assert refusal.value.exit_code == 2
    for part in ("mesh.tp", "tp=2", "9 heads and 3 KV heads", "pinned to 1", "gate tests/parity"):
        assert part in text


def test_tp_3_divides_the_heads_but_no_gate_proved_it_and_the_leaves_do_not_divide():
    with pytest.raises(MeshNotClaimed, match="8 vocabulary leaves"):
        smollm2().check_mesh({"tp": 3})


@pytest.mark.parametrize("axis", AXES)
def test_an_unproved_degree_is_refused_on_every_axis_with_the_proved_ones(axis):
    contract = qwen3_on_hopper()
    proved = contract.claims.axis(axis).allowed
    with pytest.raises(MeshNotClaimed) as refusal:
        contract.check_mesh({axis: 16})
    assert refusal.value.field == f"mesh.{axis}"
    assert ", ".join(map(str, proved)) in str(refusal.value.allowed)


@given(mesh=st.dictionaries(st.sampled_from(AXES), st.sampled_from([1, 2, 3, 4, 8]), max_size=7))
@settings(max_examples=100, deadline=None)
def test_a_mesh_passes_exactly_when_every_degree_is_claimed(mesh):
    contract = qwen3_on_hopper()
    claimed = all(degree in contract.claims.axis(axis).allowed for axis, degree in mesh.items())
    if claimed:
        contract.check_mesh(mesh)
    else:
        with pytest.raises(MeshNotClaimed):
            contract.check_mesh(mesh)


def test_an_axis_pinned_to_two_refuses_a_mesh_that_leaves_it_out():
    base = qwen3_on_hopper()
    pinned = [claim.model_copy(update={"degree": 2}) if claim.axis == "sp" else claim for claim in base.claims.topology]
    contract = base.replaced(claims=base.claims.model_copy(update={"topology": tuple(pinned)}))
    contract.check_mesh({"sp": 2})
    with pytest.raises(MeshNotClaimed, match="sp=1"):
        contract.check_mesh({})


@pytest.mark.parametrize("mesh", [{"xp": 1}, {"tp": 0}, {"tp": -1}, {"tp": 1.0}, {"tp": True}, {"tp": "1"}])
def test_axes_and_degrees_that_are_not_are_refused(mesh):
    with pytest.raises(MeshNotClaimed):
        smollm2().check_mesh(mesh)


def test_an_unproved_contract_refuses_every_mesh_until_it_is_verified():
    claims = smollm2().claims.model_copy(update={"state": "unproved"})
    with pytest.raises(MeshNotClaimed, match="isojax verify"):
        smollm2().replaced(claims=claims).check_mesh({})


@pytest.mark.parametrize(("vocabulary", "padded"), [(151936, 152064), (151936, 151936), (49159, 49216)])
def test_vocabularies_cut_over_two_ranks_and_never_over_five(vocabulary, padded):
    """Case 10."""
    model, semantics = hopper_with_vocabulary(vocabulary, padded)
    assert why_uncuttable(model, semantics, "tp", 2) is None
    assert f"{padded} vocabulary rows" in why_uncuttable(model, semantics, "tp", 5)


def test_an_unpadded_odd_vocabulary_cannot_be_cut_over_two_ranks():
    """Case 10."""
    model, semantics = hopper_with_vocabulary(49159, 49159)
    assert "49159 vocabulary rows" in why_uncuttable(model, semantics, "tp", 2)


def test_ranks_with_unequal_vocabulary_tiles_are_refused():
    """Case 11: the tree over the vocabulary is the same on every mesh only if all ranks hold whole, equal leaves."""
    model, semantics = hopper_with_vocabulary(151936, 152064)
    six_leaves = semantics.model_copy(update={"vocabulary_leaves": 6})
    assert "6 vocabulary leaves" in why_uncuttable(model, six_leaves, "tp", 4)
    assert why_uncuttable(model, semantics, "tp", 4) is None


@pytest.mark.parametrize(
    ("axis", "degree", "words"),
    [("tp", 8, "4 leaves"), ("tp", 7, "12288 intermediate columns"), ("pp", 37, "36 layers"), ("ep", 2, "dense")],
)
def test_the_sizes_in_the_way_are_named(axis, degree, words):
    contract = qwen3_on_hopper()
    assert words in why_uncuttable(contract.model, contract.semantics, axis, degree)


def test_experts_are_spread_evenly():
    contract = qwen3_on_hopper()
    mixture = contract.model.model_copy(update={"num_experts": 128})
    assert why_uncuttable(mixture, contract.semantics, "ep", 8) is None
    assert "128 experts" in why_uncuttable(mixture, contract.semantics, "ep", 3)


def test_more_ranks_than_kv_heads_share_them_when_they_divide():
    contract = qwen3_on_hopper()
    model = contract.model.model_copy(update={"num_kv_heads": 2})
    assert why_uncuttable(model, contract.semantics, "tp", 4) is None


def test_a_contract_cannot_claim_what_it_would_have_to_refuse():
    base = qwen3_on_hopper()
    claims = base.claims.model_copy(update={"topology": topology("g", {"tp": (1, 8)})})
    with pytest.raises(BadContract, match="4 leaves"):
        base.replaced(claims=claims)


@pytest.mark.parametrize(
    ("text", "mesh"), [("tp=4,ep=8", {"tp": 4, "ep": 8}), (" tp = 2 , ", {"tp": 2}), ("", {}), ("dp=1", {"dp": 1})]
)
def test_a_mesh_is_read_as_written(text, mesh):
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    "text", ["tp", "tp=", "tp=0", "tp=-1", "tp=1.5", "tp=2,tp=4", "xp=2", "tp:2", "tp=2 ep=2", "TP=2"]
)
def test_a_mesh_that_is_nonsense_is_refused(text):
    with pytest.raises(BadConfig, match="mesh"):
        parse_mesh(text)
