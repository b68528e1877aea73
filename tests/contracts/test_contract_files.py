"""Files: canonical bytes, byte-stable round trips, strict reading, and a published schema that is current."""

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from contract_samples import leaves, qwen3_on_hopper, report, smollm2
from hypothesis import given
from hypothesis import strategies as st

from contracts import FrozenMap, bits_float, canonical_bytes, float_bits, load_contract, parse_contract, save_contract
from contracts.errors import BadContract, IdentityMismatch
from contracts.schema import SCHEMA_FILE, schema_text


@pytest.mark.parametrize("contract", [smollm2(), qwen3_on_hopper()], ids=["smollm2", "qwen3"])
def test_a_round_trip_is_byte_stable(contract, tmp_path):
    file = save_contract(contract, tmp_path)
    first = file.read_bytes()
    loaded = load_contract(tmp_path)
    assert loaded == contract
    assert save_contract(loaded, tmp_path / "again.json").read_bytes() == first == canonical_bytes(json.loads(first))


def test_a_file_laid_out_for_reading_is_the_same_contract(tmp_path):
    file = tmp_path / "pretty.json"
    file.write_text(json.dumps(smollm2().model_dump(mode="json"), indent=4))
    assert load_contract(file) == smollm2()


def test_canonical_bytes_are_those_of_rfc_8785():
    assert canonical_bytes({"b": [1, True, None], "a": "é\n", "\ue000": 1, "\U00010000": 2}) == (
        '{"a":"é\\n","b":[1,true,null],"\U00010000":2,"\ue000":1}'.encode()
    )


@pytest.mark.parametrize("value", [1.0, float("nan"), {"a": [0.5]}, {1: 2}, 2**53, "\ud800", b"x", {1, 2}])
def test_values_without_an_exact_canonical_form_are_refused(value):
    with pytest.raises(BadContract):
        canonical_bytes(value)


@given(st.floats(allow_nan=False))
def test_a_float_comes_back_with_the_same_bits(value):
    back = bits_float(float_bits(value))
    assert float_bits(back) == float_bits(value)
    assert back == value


@pytest.mark.parametrize("text", ["1.0", "f64:3FF0000000000000", "f64:3ff", "f32:3f800000", ""])
def test_a_float_that_is_not_a_bit_pattern_is_refused(text):
    with pytest.raises(BadContract, match="f64:"):
        bits_float(text)


def edited(change):
    """The text of SmolLM2's contract after `change` of its JSON."""
    data = smollm2().model_dump(mode="json")
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda data: data.update(extra=1), ["extra", "unknown field"]),
        (lambda data: data["semantics"].update(top_k=5), ["semantics.top_k", "unknown field"]),
        (lambda data: data["semantics"].pop("nan_policy"), ["semantics.nan_policy", "nothing"]),
        (lambda data: data["model"].update(num_heads="9"), ["model.num_heads", "'9'", "integer"]),
        (lambda data: data["composition"][0].update(cases=[]), ["composition.0.cases"]),
        (lambda data: data["semantics"].update(kv_cache_dtype="fp8"), ["kv_cache_dtype", "scale of its own"]),
        (lambda data: data.update(schema_version=2), ["schema_version", "2"]),
        (lambda data: data["claims"]["topology"][0].update(kind="free"), ["claims.topology.0", "free"]),
        (lambda data: data["semantics"].update(temperature=1.0), ["1.0", "bit patterns"]),
        (lambda data: data["semantics"].update(temperature=1), ["temperature", "f64:"]),
        (lambda data: data["deployment"].update(notes="\ud800"), ["notes"]),
    ],
)
def test_a_malformed_file_is_refused_by_field(change, names):
    with pytest.raises(BadContract) as refusal:
        parse_contract(edited(change))
    for name in names:
        assert name in str(refusal.value)


def test_an_edited_file_is_refused_because_its_identities_no_longer_fit(tmp_path):
    file = tmp_path / "contract.json"
    file.write_text(edited(lambda data: data["composition"][2]["constants"].update(leaves=2)))
    with pytest.raises(IdentityMismatch, match="changed by hand"):
        load_contract(file)
    file.write_text(edited(lambda data: data.pop("identities")))
    with pytest.raises(IdentityMismatch, match="not sealed"):
        load_contract(file)
    with pytest.raises(IdentityMismatch, match="not sealed"):
        save_contract(parse_contract(file.read_text()), tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"a":1,"a":2}', b"\xff\xfe", b'{"a":NaN}', b'{"a":1e999}', b"[" * 100_000],
)
def test_a_damaged_file_is_refused(content, tmp_path):
    file = tmp_path / "contract.json"
    file.write_bytes(content)
    with pytest.raises(BadContract):
        load_contract(file)


def test_a_contract_that_says_one_thing_twice_is_refused():
    text = smollm2().canonical_bytes().decode()
    assert parse_contract(text) == smollm2()
    # The last of two equal keys wins in most readers, the first in some.
    with pytest.raises(BadContract, match=r"vocab_size: found the key twice"):
        parse_contract(text.replace('"vocab_size":49152', '"vocab_size":1,"vocab_size":49152'))


def test_a_missing_file_is_refused_with_its_path(tmp_path):
    with pytest.raises(BadContract, match=r"execution_contract\.json"):
        load_contract(tmp_path)
    with pytest.raises(BadContract, match="nowhere"):
        load_contract(tmp_path / "nowhere.json")


def test_the_published_schema_is_current():
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run `python -m contracts.schema`"


def test_the_published_schema_closes_every_object_and_says_which_identity_a_field_rotates():
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    sections = [schema, *schema["$defs"].values()]
    assert all(section["additionalProperties"] is False for section in sections)
    semantics = schema["$defs"]["Semantics"]["properties"]
    assert {tuple(field["x-identities"]) for field in semantics.values()} == {("numerical_policy",)}
    assert schema["$defs"]["CompositionEntry"]["properties"]["gate"]["x-identities"] == []


def test_the_published_schema_accepts_our_files_and_refuses_an_unknown_field():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    for contract in (smollm2(), qwen3_on_hopper()):
        jsonschema.validate(json.loads(contract.canonical_bytes()), schema)
    for text in (edited(lambda data: data.update(extra=1)), edited(lambda data: data["model"].pop("family"))):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(json.loads(text), schema)


def test_contracts_and_reports_survive_another_process():
    assert pickle.loads(pickle.dumps(qwen3_on_hopper())) == qwen3_on_hopper()
    assert pickle.loads(pickle.dumps(report(smollm2()))) == report(smollm2())


def test_a_frozen_map_reads_like_a_dict_in_the_order_of_its_keys():
    built = FrozenMap({"b": 2, "a": 1})
    assert list(built) == ["a", "b"]
    assert built == {"a": 1, "b": 2}
    assert hash(built) == hash(FrozenMap({"a": 1, "b": 2}))


def test_the_contract_needs_no_framework():
    """What the import table demands, seen in a fresh process."""
    code = (
        "import contracts, contracts.weight_digest, sys; print(*{'jax', 'flax', 'torch', 'vllm'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_the_contract_reference_describes_every_field_with_its_identities():
    reference = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
    for name in {path[-1] for contract in (smollm2(), qwen3_on_hopper()) for path, _, _ in leaves(contract)}:
        assert re.search(rf"`(\w+\.)?{name}`", reference), name
    rows = re.findall(r"^\| (`[^|]*) \| ((?:[SND] ?)+|none) \|", reference, re.MULTILINE)
    letters = {"S": "semantic", "N": "numerical_policy", "D": "deployment"}
    stated = {
        name: [letters[letter] for letter in found.split()] if found != "none" else []
        for names, found in rows
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names)
    }
    declared = {path[-1]: list(where.identities) for path, where, _ in leaves(smollm2())} | {
        path[-1]: list(where.identities) for path, where, _ in leaves(qwen3_on_hopper())
    }
    assert {name: declared[name] for name in stated} == stated
    assert len(stated) > 25
