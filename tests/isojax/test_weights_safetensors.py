"""Checkpoints from safetensors: read exactly, or refused with the tensor's name."""

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from policy_samples import FAMILIES, bits, tiny_policy
from safetensors.numpy import save_file

import isojax
from contracts.errors import BadCheckpoint, BadConfig, UnsupportedModel
from isojax.weights.names import name_table, unpack
from isojax.weights.safetensors import open_tensors

Tensors = dict[str, np.ndarray]
NORM, UP = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight"


def checkpoint(folder: Path, name: str = "llama_tied", dtype: str = "float32") -> Tensors:
    """Write a Hugging Face checkpoint of a tiny policy; returns its tensors."""
    policy, params = tiny_policy(name, dtype)
    tensors = {key: np.array(value) for key, value in unpack(policy.config, jax.device_get(params))}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[name] | {"torch_dtype": dtype}))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def shard(folder: Path, tensors: Tensors, shards: int = 3) -> dict[str, str]:
    """Replace the single file by shards with an index; returns the weight map."""
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def rewrite(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_name_table_covers_every_packed_element_once(name: str) -> None:
    policy, _ = tiny_policy(name)
    written = {key: np.zeros(shape.shape, int) for key, shape in policy.parameter_shapes.items()}
    for entry in name_table(policy.config):
        target = written[entry.packed][entry.index] if entry.index else written[entry.packed]
        assert target.shape == entry.shape
        target += 1
    assert all((count == 1).all() for count in written.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3_biases", "qwen3"])
def test_single_and_sharded_checkpoints_give_the_packed_bits(name: str, dtype: str, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, name, dtype)
    _, expected = tiny_policy(name, dtype)
    for sharded in (False, True):
        if sharded:
            shard(tmp_path, tensors)
        policy, params = isojax.load(tmp_path)
        assert policy.dtype == dtype
        assert params.keys() == expected.keys()
        for key, value in params.items():
            np.testing.assert_array_equal(bits(value), bits(expected[key]))


def test_packing_puts_projections_in_order(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path, "qwen3")
    _, params = isojax.load(tmp_path)
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    np.testing.assert_array_equal(params["layers.qkv"][1], np.concatenate(parts))
    gate_up = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    np.testing.assert_array_equal(params["layers.gate_up"][0], np.concatenate(gate_up))
    np.testing.assert_array_equal(params["norms"][2], tensors["model.norm.weight"])


def test_narrowing_rounds_to_nearest_even_and_widening_is_exact(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    # Midpoints between neighbouring bfloat16 values, of both parities and signs.
    midpoints = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000], np.uint32).view(np.float32)
    tensors["model.norm.weight"][:4] = midpoints
    rewrite(tmp_path, tensors)
    _, narrow = isojax.load(tmp_path, "bfloat16")
    np.testing.assert_array_equal(bits(narrow["norms"])[-1, :4], [0x3F80, 0x3F82, 0xBF80, 0xBF82])
    rewrite(tmp_path, {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})
    _, wide = isojax.load(tmp_path, "float32")
    for name, value in wide.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(narrow[name], np.float32))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(UP.format(1)), "model.layers.1.mlp.up_proj.weight: found missing"),
        (
            lambda t: t.update({UP.format(2): t[NORM]}),
            "model.layers.2.mlp.up_proj.weight: found not part",
        ),
        (lambda t: t.update({"model.norm.bias": t[NORM]}), "model.norm.bias: found not part of the policy"),
        (lambda t: t.update({NORM: t[NORM][:-1].copy()}), "model.norm.weight: found shape [63]"),
        (lambda t: t.update({UP.format(0): t[UP.format(0)].T.copy()}), "up_proj.weight: found shape [64, 96]"),
        (lambda t: t.update({NORM: t[NORM].astype(np.int8)}), "model.norm.weight: found dtype I8"),
        (lambda t: t.update({NORM: t[NORM].astype(np.float64)}), "model.norm.weight: found dtype F64"),
        (lambda t: t[NORM].__setitem__(3, np.nan), "norms: found NaN or infinity"),
    ],
    ids=["missing", "extra layer", "extra", "misshapen", "transposed", "integer", "double", "nan"],
)
def test_a_wrong_tensor_is_refused_by_name(change, named: str, tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    change(tensors)
    rewrite(tmp_path, tensors)
    with pytest.raises(BadCheckpoint, match=re.escape(named)):
        isojax.load(tmp_path)


def test_a_tied_head_that_is_written_twice_must_be_equal(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    rewrite(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert "lm_head" not in isojax.load(tmp_path)[1]
    head = tensors["model.embed_tokens.weight"].copy()
    head[5, 7] = np.nextafter(head[5, 7], np.float32(1))
    rewrite(tmp_path, tensors | {"lm_head.weight": head})
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight: found a head .* that differs"):
        isojax.load(tmp_path)


def test_an_untied_config_needs_its_head(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    with pytest.raises(BadCheckpoint, match=r"lm_head\.weight: found missing"):
        isojax.load(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "header", "empty", "text"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    contents = {
        "truncated": content[:-1],
        "header": content[:20] + b"\0" + content[21:],
        "empty": b"",
        "text": b"version https://git-lfs",
    }
    file.write_bytes(contents[damage])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        isojax.load(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path)
    weight_map = shard(tmp_path, tensors)
    index = tmp_path / "model.safetensors.index.json"
    name = sorted(weight_map)[0]
    other = next(file for file in weight_map.values() if file != weight_map[name])
    index.write_text(json.dumps({"weight_map": weight_map | {name: other}}))
    with pytest.raises(BadCheckpoint, match=re.escape(name)):
        isojax.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {key: file for key, file in weight_map.items() if key != name}}))
    with pytest.raises(BadCheckpoint, match=re.escape(name)):
        isojax.load(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {name: "model-00009-of-00003.safetensors"}}))
    with pytest.raises(BadCheckpoint, match=r"model-00009-of-00003\.safetensors: found no such file"):
        isojax.load(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map | {name: "../secret.safetensors"}}))
    with pytest.raises(BadCheckpoint, match=r"\.\./secret"):
        isojax.load(tmp_path)
    index.write_text("{")
    with pytest.raises(BadCheckpoint, match=r"index\.json"):
        isojax.load(tmp_path)


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="existing folder"):
        isojax.load(tmp_path / "nowhere")
    with pytest.raises(BadConfig, match=r"config\.json"):
        isojax.load(tmp_path)
    for content in ("{", "[1]", '{"rope_theta": 1.0, "rope_theta": 2.0}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(BadConfig, match=r"config\.json"):
            isojax.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(BadConfig, match=r"config\.json"):
        isojax.load(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3"]))
    with pytest.raises(BadCheckpoint, match="weights: found neither"):
        isojax.load(tmp_path)


def test_a_checkpoint_in_half_precision_needs_an_explicit_dtype(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float16"}))
    with pytest.raises(UnsupportedModel, match="torch_dtype"):
        isojax.load(tmp_path)
    assert isojax.load(tmp_path, "float32")[0].dtype == "float32"


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "x", "a": "y"}}', None],
)
def test_a_damaged_index_is_refused_by_file(content: str | None, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.mkdir() if content is None else index.write_text(content)
    with pytest.raises(BadCheckpoint, match=r"index\.json"), open_tensors(tmp_path):
        pass
