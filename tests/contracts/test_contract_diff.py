"""A diff names every field that differs, with both values and the identities that rotate."""

import pytest
from contract_samples import entry, leaves, qwen3_on_hopper, smollm2, value_at, with_value

from contracts import (
    IDENTITIES,
    Difference,
    FrozenMap,
    compute_identities,
    diff,
    float_bits,
    format_contract,
    format_diff,
    topology,
)


def with_constants(**constants):
    contract = smollm2()
    others = [item for item in contract.composition if item.region != "matmul"]
    return contract.replaced(composition=(entry("matmul", constants=constants), *others))


def test_a_changed_constant_is_named_with_the_identity_that_it_rotates():
    differences = diff(smollm2(), with_constants(leaves=2, column_tile=192))
    assert differences == [Difference("composition.matmul.constants.leaves", 4, 2, ("numerical_policy",))]
    text = format_diff(differences)
    assert text.splitlines() == [
        "composition.matmul.constants.leaves",
        "  left     4",
        "  right    2",
        "  rotates  numerical_policy",
        "",
        "1 difference.",
        "semantic: unchanged",
        "numerical_policy: rotates",
        "deployment: unchanged",
    ]


def test_equal_contracts_have_no_difference():
    assert diff(smollm2(), smollm2()) == []
    assert format_diff([]) == "The contracts are equal."


def test_a_constant_that_one_side_lacks_shows_as_none():
    (difference,) = diff(smollm2(), with_constants(leaves=4))
    assert (difference.field, difference.left, difference.right) == (
        "composition.matmul.constants.column_tile",
        192,
        None,
    )


def test_true_and_one_differ_although_python_holds_them_for_equal():
    (difference,) = diff(with_constants(leaves=1), with_constants(leaves=True))
    assert difference.rotates == ("numerical_policy",)


def test_a_float_is_shown_in_decimal_and_in_bits():
    other = with_value(smollm2(), ("semantics", "temperature"), float_bits(0.6))
    assert "right    0.6 (f64:3fe3333333333333)" in format_diff(diff(smollm2(), other))


def test_a_case_that_moves_to_another_implementation_is_named_with_its_cases():
    contract = smollm2()
    others = [item for item in contract.composition if item.region != "attention"]
    moved = contract.replaced(
        composition=(
            *others,
            entry("attention", ("trainer_fwd", "trainer_score", "engine_prefill"), constants={"split": 512}),
            entry("attention", ("engine_decode",), impl_id="paged_attention", constants={"split": 512}),
        )
    )
    (difference,) = diff(contract, moved)
    assert difference.field == "composition.attention[engine_prefill].impl_id"
    assert (difference.left, difference.right) == ("paged_attention", "attention")


def test_an_axis_that_becomes_invariant_is_named():
    base = qwen3_on_hopper()
    claims = base.claims.model_copy(
        update={"topology": topology("tests/gpu/mesh", {"tp": (1, 2, 4), "fsdp": (1, 8), "dp": (1, 2)})}
    )
    found = {item.field: item.rotates for item in diff(base, base.replaced(claims=claims))}
    assert found == {
        "claims.topology.dp.kind": ("numerical_policy",),
        "claims.topology.dp.degree": ("numerical_policy",),
        "claims.topology.dp.degrees": ("deployment",),
    }


def test_a_region_that_one_side_lacks_is_shown_with_all_its_fields():
    contract = smollm2()
    more = contract.replaced(composition=(*contract.composition, entry("swiglu")))
    fields = [item.field for item in diff(contract, more)]
    assert "composition.swiglu.impl_id" in fields


@pytest.mark.parametrize("contract", [smollm2(), qwen3_on_hopper()], ids=["smollm2", "qwen3"])
def test_the_diff_rotates_what_the_identities_rotate_whatever_changes(contract):
    for path, declared, _ in leaves(contract):
        # Entries' cases and regions, the list of cases, and claims' axes cannot change alone in a valid contract.
        if path[0] == "identities" or path[-1] in ("cases", "region", "axis"):
            continue
        value = value_at(contract, path)
        if isinstance(value, FrozenMap):
            other = FrozenMap({**value, "added": 1})
        else:
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "changed"
        changed = with_value(contract, path, other)
        differences = diff(contract, changed)
        assert differences, path
        before, after = contract.identities, compute_identities(changed)
        rotated = {name for name in IDENTITIES if getattr(before, name) != getattr(after, name)}
        assert {name for item in differences for name in item.rotates} == rotated == set(declared.identities)


def test_a_contract_is_shown_with_floats_in_decimal_and_every_region_and_axis():
    text = format_contract(smollm2())
    for part in (
        "temperature         1.0 (f64:3ff0000000000000)",
        "paged_attention version 1 on cpu-avx2 in engine_prefill, engine_decode",
        "matmul version 1 on cpu-avx2 in all cases; constants column_tile=192, leaves=4; gate tests/parity",
        "tp              pinned to 1; gate tests/parity",
        smollm2().identities.numerical_policy,
    ):
        assert part in text
    assert "not sealed" in format_contract(smollm2().model_copy(update={"identities": None}))
