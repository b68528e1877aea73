"""Reading config.json: what affects numerics is read, known to be harmless, or refused by name."""

import dataclasses

import numpy as np
import pytest
from policy_samples import FAMILIES, LLAMA3_ROPE, raw_config

from contracts.errors import BadConfig, UnsupportedModel
from isojax.policy.config import PolicyConfig, RopeConfig, config_digest
from isojax.policy.hugging_face import from_hugging_face, to_hugging_face
from isojax.policy.rope import inverse_frequencies, rope_table

# As published with HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_the_published_smollm2_config_is_read() -> None:
    config = from_hugging_face(SMOLLM2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (9, 3, 64, 30)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.tied_head
    assert not config.qk_norm
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_config_reads_back_equal(name: str) -> None:
    config = from_hugging_face(FAMILIES[name])
    exported = to_hugging_face(config, "bfloat16")
    assert exported["architectures"] == ["IsojaxPolicyForCausalLM"]
    assert from_hugging_face(exported) == config


def test_both_forms_of_rope_settings_give_one_config() -> None:
    old = raw_config(rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    new = raw_config(rope_theta=None, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5})
    older = raw_config(
        rope_theta=5e5, rope_scaling={"type": "llama3"} | {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"}
    )
    assert from_hugging_face(old) == from_hugging_face(new) == from_hugging_face(older)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": LLAMA3_ROPE | {"beta_fast": 32}}, "rope_scaling.beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}, "architectures"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "architectures"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": [{}]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"isojax": {"attention_split": 513}}, "attention_split"),
    ],
)
def test_what_is_not_exactly_implemented_is_refused_by_name(changes: dict, field: str) -> None:
    with pytest.raises(UnsupportedModel) as refusal:
        from_hugging_face(raw_config(**changes))
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "rope_scaling.low_freq_factor"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"model_type": "qwen3"}, "model_type"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"eos_token_id": [2, 97]}, "eos_token_id[1]"),
    ],
)
def test_a_malformed_config_is_refused_by_name(changes: dict, field: str) -> None:
    with pytest.raises(BadConfig) as refusal:
        from_hugging_face(raw_config(**changes))
    assert refusal.value.field == field


def test_qwen3_sizes_have_no_silent_default() -> None:
    for field in ("head_dim", "num_key_value_heads"):
        raw = {name: value for name, value in raw_config("qwen3").items() if name != field}
        with pytest.raises(BadConfig, match=field):
            from_hugging_face(raw)


def test_a_sliding_window_that_is_switched_off_is_harmless() -> None:
    raw = raw_config("qwen3", use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    assert from_hugging_face(raw) == from_hugging_face(raw_config("qwen3"))
    with pytest.raises(UnsupportedModel, match="use_sliding_window"):
        from_hugging_face(raw | {"use_sliding_window": True})


def test_every_numeric_field_moves_the_config_digest() -> None:
    config = from_hugging_face(raw_config(rope_scaling=LLAMA3_ROPE))
    changes = {
        "vocab_size": 98,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 32,
        "max_position": 513,
        "rms_norm_eps": np.nextafter(config.rms_norm_eps, 1).item(),
        "rope": dataclasses.replace(config.rope, factor=np.nextafter(8.0, 9).item()),
        "attention_bias": True,
        "tied_head": True,
        "family": "qwen3",
    }
    digests = {config_digest(dataclasses.replace(config, **{name: value})) for name, value in changes.items()}
    assert len(digests | {config_digest(config)}) == len(changes) + 1
    stop = dataclasses.replace(config, eos_token_ids=(7,), initializer_range=0.5)
    assert config_digest(stop) == config_digest(config)


def test_the_rope_table_is_the_fp64_table_rounded_once() -> None:
    # Positions above 4096, where an angle computed in fp32 is off by many units.
    config = from_hugging_face(raw_config(max_position_embeddings=8192))
    table = rope_table(config)
    assert table.dtype == np.float32
    assert table.shape == (8192, 16)
    exact = np.longdouble(8191) * np.longdouble(10000.0) ** -(np.arange(0, 16, 2, dtype=np.longdouble) / 16)
    np.testing.assert_array_equal(table[8191, :8], np.cos(exact).astype(np.float32))
    np.testing.assert_array_equal(table[8191, 8:], np.sin(exact).astype(np.float32))
    single = np.float32(8191) * np.float32(10000.0) ** -(np.arange(0, 16, 2, dtype=np.float32) / np.float32(16))
    assert (np.cos(single) != table[8191, :8]).any(), "fp32 angles must show, or the test proves nothing"


def test_llama3_scaling_leaves_short_waves_and_stretches_long_ones() -> None:
    rope = from_hugging_face(raw_config(rope_scaling=LLAMA3_ROPE, rope_theta=5e5)).rope
    scaled, plain = inverse_frequencies(rope, 64), inverse_frequencies(RopeConfig(rope.theta), 64)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 64 / 4, wavelength > 64 / 1
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_array_equal(scaled[long], plain[long] / 8)
    assert ((scaled < plain) & (scaled > plain / 8))[~short & ~long].all()


def test_leaves_must_divide_what_is_cut() -> None:
    config = from_hugging_face(raw_config())
    with pytest.raises(UnsupportedModel, match="leaves"):
        dataclasses.replace(config, leaves=3)
    with pytest.raises(UnsupportedModel, match="multiple of leaves"):
        dataclasses.replace(config, intermediate_size=98)
    assert isinstance(PolicyConfig.from_hugging_face(raw_config()), PolicyConfig)
