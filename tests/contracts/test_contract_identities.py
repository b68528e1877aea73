"""Reordering rotates nothing; a field rotates exactly the identities that it declares; no field is undeclared."""

import random
from typing import Annotated, get_args

import pytest
from contract_samples import (
    DIGEST,
    OTHER_DIGEST,
    leaves,
    qwen3_on_hopper,
    smollm2,
    value_at,
    with_value,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import (
    IDENTITIES,
    ExecutionContract,
    FrozenMap,
    InvariantClaim,
    compute_identities,
    diff,
    float_bits,
)
from contracts.section import BITS, Section, section_types

CONTRACTS = {"smollm2": smollm2(), "qwen3": qwen3_on_hopper()}
LEAVES = [
    (contract, path, declared)
    for contract, built in CONTRACTS.items()
    for path, declared, _ in leaves(built)
    if path[0] != "identities"
]


def declared_fields(section: type[Section]) -> set[tuple[type[Section], str]]:
    """Every leaf that the contract's types declare, whether or not a sample has it."""
    found = set()
    for name, declared in section.declarations.items():
        if declared is not None:
            found.add((section, name))
        for inner in section_types(section.model_fields[name].annotation):
            found |= declared_fields(inner)
    return found


def shuffled(value, random_source):
    """The same JSON, with the keys of every object and the items of every set in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(item, random_source)) for key, item in value.items()]
        random_source.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        return random_source.sample([shuffled(item, random_source) for item in value], len(value))
    return value


@st.composite
def changed(draw, value, annotation):
    """Another value of the same kind of leaf."""
    if isinstance(value, FrozenMap):
        items = dict(value)
        if items and draw(st.booleans()):
            key = draw(st.sampled_from(sorted(items)))
            if draw(st.booleans()):
                del items[key]
            else:
                items[key] = draw(changed(items[key], None))
        else:
            items["added"] = 1
        return FrozenMap(items)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw(st.integers(-(2**53) + 1, 2**53 - 1).filter(lambda other: other != value))
    if isinstance(value, tuple):
        return draw(st.sampled_from([value[1:], (*value, value[-1])]))
    others = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from([DIGEST, float_bits(2.0)])
    if type(None) in get_args(annotation):
        others |= st.none()
    return draw(others.filter(lambda other: other != value))


@given(name=st.sampled_from(sorted(CONTRACTS)), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_reordering_never_changes_an_identity_or_a_byte(name, seed):
    contract = CONTRACTS[name]
    again = ExecutionContract.model_validate(shuffled(contract.model_dump(mode="json"), random.Random(seed)))
    assert again.identities == compute_identities(again) == contract.identities
    assert again.canonical_bytes() == contract.canonical_bytes()
    assert diff(contract, again) == []


@pytest.mark.parametrize(
    ("name", "path", "declared"), LEAVES, ids=[f"{name}-{'.'.join(map(str, path))}" for name, path, _ in LEAVES]
)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_changing_a_field_rotates_exactly_the_identities_that_it_declares(name, path, declared, data):
    contract = CONTRACTS[name]
    value = value_at(contract, path)
    owner = value_at(contract, path[:-1])
    other = with_value(contract, path, data.draw(changed(value, type(owner).model_fields[path[-1]].annotation)))
    before, after = contract.identities, compute_identities(other)
    rotated = {identity for identity in IDENTITIES if getattr(before, identity) != getattr(after, identity)}
    assert rotated == set(declared.identities)


def test_the_samples_reach_every_field_that_the_contract_declares():
    reached = {where for contract in CONTRACTS.values() for _, _, where in leaves(contract)}
    assert reached == declared_fields(ExecutionContract)


def test_only_these_fields_may_differ_between_two_sides_with_equal_bits():
    # Written out once more, so that moving a field out of `numerical_policy` takes two deliberate edits.
    outside = {
        (section.__name__, name)
        for section, name in declared_fields(ExecutionContract)
        if "numerical_policy" not in section.declarations[name].identities
    }
    assert outside == {
        ("ModelSection", "tokenizer_digest"),
        ("CompositionEntry", "gate"),
        ("InvariantClaim", "degrees"),
        ("InvariantClaim", "gate"),
        ("PinnedClaim", "gate"),
        ("Claims", "device_kinds"),
        ("Claims", "state"),
        ("Claims", "invalidated_by"),
        *(("Deployment", name) for name in ("trainer_mesh", "engine_mesh", "policy_path", "notes")),
        *(("Identities", name) for name in IDENTITIES),
    }


def test_a_field_without_a_declared_identity_cannot_be_defined():
    with pytest.raises(TypeError, match=r"Forgetful\.tile declares 0 memberships"):

        class Forgetful(Section):
            tile: int

    with pytest.raises(TypeError, match="declares 2 memberships"):

        class Undecided(Section):
            tile: Annotated[int, BITS, BITS]


def test_a_bit_relevant_field_has_no_default_to_hide_behind():
    # `kind` is the tag that tells the two claims apart; a file must have it all the same.
    with_default = {
        name
        for section, name in declared_fields(ExecutionContract)
        if not section.model_fields[name].is_required() and "numerical_policy" in section.declarations[name].identities
    }
    assert with_default == {"kind"}


def test_renaming_a_gate_rotates_nothing():
    contract = qwen3_on_hopper()
    gates = [path for path, _, _ in leaves(contract) if path[-1] == "gate"]
    assert len(gates) == 3 + 7
    for path in gates:
        assert compute_identities(with_value(contract, path, "tests/renamed")) == contract.identities


def test_proving_one_more_degree_keeps_the_numerical_policy_but_pinning_another_rotates_it():
    contract = qwen3_on_hopper()
    tp = next(index for index, claim in enumerate(contract.claims.topology) if claim.axis == "tp")
    proved = with_value(contract, ("claims", "topology", tp, "degrees"), (1, 2, 4, 8))
    assert compute_identities(proved).numerical_policy == contract.identities.numerical_policy
    dp = contract.claims.topology.index(contract.claims.axis("dp"))
    pinned = with_value(contract, ("claims", "topology", dp, "degree"), 2)
    assert compute_identities(pinned).numerical_policy != contract.identities.numerical_policy
    invariant = with_value(
        contract, ("claims", "topology", dp), InvariantClaim(axis="dp", degrees=(1,), gate="tests/parity")
    )
    assert compute_identities(invariant).numerical_policy != contract.identities.numerical_policy


def test_the_canonical_form_has_not_moved():
    # Fixed values: a change of the canonical form, not only of a field, must be deliberate.
    found = CONTRACTS["smollm2"].identities
    assert (found.semantic[:16], found.numerical_policy[:16], found.deployment[:16]) == (
        "7859275873861fe5",
        "a8a79dd9e88d81db",
        "9b5d4d09745185da",
    )


def test_two_ways_to_write_one_float_are_one_identity_and_minus_zero_is_another():
    contract = qwen3_on_hopper()
    matmul = next(item for item in contract.composition if item.region == "matmul")

    def identity(scale):
        entry = type(matmul)(**{**matmul.model_dump(), "constants": {"leaves": 4, "scale": scale}})
        others = [item for item in contract.composition if item.region != "matmul"]
        return contract.replaced(composition=(entry, *others)).identities.numerical_policy

    assert identity(-0.0) == identity(float_bits(-0.0)) == contract.identities.numerical_policy
    assert len({identity(-0.0), identity(0.0), identity(0), identity(False), identity("0")}) == 5


def test_a_tokenizer_change_rotates_semantic_alone():
    """Case 29: another chat template is another tokenizer digest."""
    other = with_value(smollm2(), ("model", "tokenizer_digest"), OTHER_DIGEST)
    after = compute_identities(other)
    assert after.semantic != smollm2().identities.semantic
    assert after.numerical_policy == smollm2().identities.numerical_policy
