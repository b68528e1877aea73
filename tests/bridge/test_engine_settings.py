"""What vLLM must be set to: left open it is set, chosen otherwise it is refused by name. No engine is started."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engine_samples import tiny_policy
from vllm import SamplingParams
from vllm.config import CompilationMode
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from bridge.plugin import register
from bridge.requests import check_sampling_params
from bridge.sampling import draw, uniform
from bridge.settings import ARCHITECTURE, CPU_WORKER, SAMPLING_PROCESSOR
from bridge.start import EngineOptions
from contracts.errors import BadConfig, BadContract, MeshNotClaimed, UnsupportedModel, UnsupportedRequest
from isojax import export_policy
from isojax.policy.config import EXPORTED_ARCHITECTURE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    register()
    path = tmp_path_factory.mktemp("policy") / "bfloat16"
    policy, params = tiny_policy("bfloat16", tied=False)
    export_policy(path, policy, params, {})
    return path


def _config(folder, **arguments):
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=256, **arguments
    ).create_engine_config()


def test_settings_left_open_are_set(folder):
    config = _config(folder)
    assert config.model_config.logprobs_mode == "raw_logits"
    assert config.model_config.logits_processors == [SAMPLING_PROCESSOR]
    assert config.model_config.dtype == torch.bfloat16
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.parallel_config.worker_cls == CPU_WORKER
    assert config.weight_transfer_config.backend == "isojax"
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.model_config.get_diff_sampling_param()["temperature"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, r"kv_cache_dtype: found fp8.*bfloat16"),
        ({"dtype": "float16"}, r"dtype: found float16; allowed: bfloat16"),
        ({"dtype": "float32"}, r"dtype: found float32; allowed: bfloat16"),
        ({"logprobs_mode": "processed_logprobs"}, r"logprobs_mode: found processed_logprobs; allowed: raw_logits"),
        ({"logits_processors": ["a.b:C"]}, r"logits_processors"),
        ({"quantization": "fp8"}, r"quantization: found fp8"),
        ({"enable_lora": True}, r"lora_config"),
        (
            {"compilation_config": {"mode": CompilationMode.VLLM_COMPILE}},
            r"compilation_config\.mode: found VLLM_COMPILE",
        ),
        ({"weight_transfer_config": {"backend": "nccl"}}, r"weight_transfer_config\.backend: found nccl"),
        ({"worker_cls": "other.Worker"}, r"worker_cls: found other\.Worker"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            r"speculative_config",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_chosen_otherwise_are_refused_by_name(folder, arguments, named):
    """Case 28 (another dtype of cache or engine), case 25 (adapters), and what else would change a value."""
    with pytest.raises(UnsupportedModel, match=named):
        _config(folder, **arguments)


@pytest.mark.parametrize("arguments", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_mesh_that_no_gate_proved_is_refused(folder, arguments):
    with pytest.raises(MeshNotClaimed, match="mesh"):
        _config(folder, **arguments)


def test_a_context_beyond_the_rope_table_is_refused(folder, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    with pytest.raises(UnsupportedModel, match="max_model_len: found 300; allowed: at most 256"):
        EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=300).create_engine_config()


def test_another_runner_is_refused(folder, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(UnsupportedModel, match="model runner: found vllm_v2; allowed: vllm_v1"):
        _config(folder)


def test_a_folder_without_a_contract_is_refused(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "execution_contract.json").unlink()
    with pytest.raises(BadContract, match=r"execution_contract\.json"):
        _config(copy)


def test_other_models_are_left_alone(folder, tmp_path):
    stock = tmp_path / "stock"
    shutil.copytree(folder, stock)
    config = json.loads((stock / "config.json").read_text())
    (stock / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    config = _config(stock)
    assert config.model_config.logprobs_mode == "raw_logprobs"
    assert not config.model_config.logits_processors
    assert config.weight_transfer_config is None
    assert config.compilation_config.mode != CompilationMode.NONE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 40),
        ("min_p", 0.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [3, 4]),
        ("min_tokens", 2),
        ("structured_outputs", StructuredOutputsParams(regex="[0-9]+")),
        ("thinking_token_budget", 5),
        ("trace_decode_token_ids", [3]),
    ],
)
def test_a_request_outside_the_semantics_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedRequest, match=f"{field}: found") as refused:
        check_sampling_params(SamplingParams(**{"max_tokens": 4, field: value}))
    assert isinstance(refused.value, VLLMValidationError), "vLLM answers these with HTTP 400"


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"seed": 4, "top_k": -1, "logprobs": 3, "n": 2}])
def test_a_request_inside_the_semantics_passes(fields):
    check_sampling_params(SamplingParams(max_tokens=4, **fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("page_size", -1), ("page_size", True), ("page_size", "16"), ("max_context", -5)),
        *(("max_step_tokens", 0), ("max_sequences", 0), ("kv_cache_bytes", 0), ("seed", -1), ("gpus", 1)),
    ],
)
def test_engine_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(BadConfig, match=rf"engine\.settings\.{name}"):
        EngineOptions.of({name: value})


def test_draws_follow_the_distribution():
    """The share of each token over 40,000 draws, within five standard errors; and the two edges of u."""
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.125], dtype=torch.float64)
    row = probabilities.log().to(torch.float32).numpy()
    draws = 40_000
    counts = torch.zeros(5)
    for index in range(draws):
        counts[draw(row, uniform(seed=9, index=index))] += 1
    errors = (probabilities * (1 - probabilities) / draws).sqrt()
    assert ((counts / draws - probabilities).abs() <= 5 * errors).all()
    assert draw(row, 0.0) == 0
    assert draw(row, 1.0 - 2.0**-53) == 4


def test_uniform_depends_on_seed_and_index():
    values = {uniform(seed, index) for seed in (0, 1, -1, 2**63) for index in range(100)}
    assert len(values) == 400
    assert all(0.0 <= value < 1.0 for value in values)


def test_exported_policies_name_the_architecture_that_the_plugin_registers():
    assert ARCHITECTURE == EXPORTED_ARCHITECTURE
