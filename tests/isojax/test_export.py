"""An exported folder loads back bit for bit, carries its contract, and refuses to be something else."""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from policy_samples import FAMILIES, bits, tiny_policy
from safetensors.numpy import load_file, save_file

import isojax
from contracts import load_contract
from contracts.errors import BadCheckpoint, BadConfig, IdentityMismatch
from isojax.weights.load import ROPE_FILE, ROPE_TENSOR

TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"chat_template": "x"}'}


def exported(folder: Path, name: str = "qwen3", dtype: str = "bfloat16", **options) -> Path:
    """The tiny policy as an exported folder."""
    policy, params = tiny_policy(name, dtype)
    isojax.export_policy(folder / "policy", policy, params, TOKENIZER, **options)
    return folder / "policy"


def edit(folder: Path, **changes) -> None:
    """Change fields of config.json by hand."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_policy_loads_back_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    policy, params = tiny_policy(name, dtype)
    folder = exported(tmp_path, name, dtype)
    loaded, found = isojax.load(folder)
    assert loaded.config == policy.config
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(bits(loaded.buffers["rope_table"]), bits(policy.buffers["rope_table"]))
    assert isojax.digest(found) == isojax.digest(params)
    for label, value in params.items():
        np.testing.assert_array_equal(bits(found[label]), bits(value))
    assert isojax.tokenizer_files(folder) == TOKENIZER


def test_the_contract_in_the_folder_is_that_of_the_loaded_policy(tmp_path: Path) -> None:
    folder = exported(tmp_path, temperature=0.7)
    policy, _ = isojax.load(folder)
    stored = load_contract(folder)
    assert stored == isojax.build_contract(policy, tokenizer=isojax.tokenizer_files(folder), temperature=0.7)


def test_a_checkpoint_and_its_export_have_one_contract(tmp_path: Path) -> None:
    policy, _ = tiny_policy()
    before = isojax.build_contract(policy, tokenizer={}).validate_identities()
    after = isojax.build_contract(isojax.load_policy(exported(tmp_path)), tokenizer={}).validate_identities()
    assert before == after


def test_transformers_reads_the_folder_and_its_settings_sample_nothing(tmp_path: Path) -> None:
    from transformers import AutoConfig, GenerationConfig

    folder = exported(tmp_path, "llama3_biases")
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "llama"
    assert config.architectures == ["IsojaxPolicyForCausalLM"]
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["rope_theta"] == 10000.0
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation.keys() == {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert GenerationConfig.from_pretrained(folder).temperature in (None, 1.0)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}


def test_an_export_replaces_an_older_one_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "stale.txt").write_text("from an older export")
    policy, params = tiny_policy()
    louder = params | {"embed": params["embed"] * 2}
    isojax.export_policy(folder, policy, louder, {})
    assert not (folder / "stale.txt").exists()
    assert not (folder / "tokenizer.json").exists()
    assert isojax.digest(isojax.load(folder)[1]) == isojax.digest(louder)
    assert os.listdir(tmp_path) == ["policy"]


def test_an_export_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported(tmp_path)
    policy, params = tiny_policy()
    before = isojax.digest(isojax.load(folder)[1])

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("isojax.export.save_contract", full_disk)
    with pytest.raises(OSError, match="No space left"):
        isojax.export_policy(folder, policy, params | {"embed": params["embed"] * 2}, {})
    assert isojax.digest(isojax.load(folder)[1]) == before
    assert os.listdir(tmp_path) == ["policy"]


def test_somebody_elses_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "thesis.tex").write_text("three years")
    with pytest.raises(BadConfig, match="folder"):
        exported(tmp_path)
    assert (tmp_path / "policy" / "thesis.tex").read_text() == "three years"


@pytest.mark.parametrize("place", [".", "..", ""])
def test_the_current_folder_is_not_replaced(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    with pytest.raises(BadConfig, match="folder: found"):
        isojax.export_policy(place, *tiny_policy(), {})


@pytest.mark.parametrize("temperature", [0.0, float("nan"), 1e-50, 1e39])
def test_a_temperature_without_log_probabilities_is_refused(temperature: float, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="temperature"):
        isojax.export_policy(tmp_path / "p", *tiny_policy(), {}, temperature=temperature)
    assert os.listdir(tmp_path) == []


def test_parameters_of_another_policy_are_refused_by_name(tmp_path: Path) -> None:
    policy, params = tiny_policy()
    with pytest.raises(BadConfig, match=r"params\[layers\.o\]: found missing"):
        isojax.export_policy(tmp_path / "p", policy, {n: v for n, v in params.items() if n != "layers.o"}, {})
    with pytest.raises(BadConfig, match=r"params\[norms\]: found float32"):
        isojax.export_policy(tmp_path / "p", policy, params | {"norms": params["norms"].astype(jnp.float32)}, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"rms_norm_eps": 1e-6}, IdentityMismatch, r"model\.config_digest"),
        ({"rope_theta": 5e3, "rope_parameters": None}, BadCheckpoint, "rope_table.safetensors"),
        ({"max_position_embeddings": 256}, BadCheckpoint, "rope_table.safetensors"),
        (
            {"isojax": {"architecture": "Qwen3ForCausalLM", "leaves": 2, "attention_split": 512}},
            IdentityMismatch,
            "leaves",
        ),
        ({"isojax": {"architecture": "Qwen3ForCausalLM", "tiles": 2}}, BadConfig, "isojax"),
        ({"isojax": None}, BadConfig, "isojax"),
    ],
)
def test_a_config_that_was_edited_after_the_export_is_refused(changes, error, named: str, tmp_path: Path) -> None:
    folder = exported(tmp_path)
    edit(folder, **changes)
    with pytest.raises(error, match=named):
        isojax.load(folder)


def test_a_table_of_another_rope_is_refused_and_the_last_unit_is_not(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    table = load_file(folder / ROPE_FILE)[ROPE_TENSOR]
    (folder / "execution_contract.json").unlink()
    other = np.nextafter(table, np.float32(2))
    save_file({ROPE_TENSOR: other}, folder / ROPE_FILE)
    np.testing.assert_array_equal(np.asarray(isojax.load(folder)[0].buffers["rope_table"]), other)
    for wrong in (table.astype(jnp.bfloat16).astype(np.float32), np.full_like(table, np.nan), table[:-1].copy()):
        save_file({ROPE_TENSOR: wrong}, folder / ROPE_FILE)
        with pytest.raises(BadCheckpoint, match=r"rope_table\.safetensors"):
            isojax.load(folder)
