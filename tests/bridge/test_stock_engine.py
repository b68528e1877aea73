"""The baseline's engine: stock vLLM that takes the trainer's weights, and claims nothing."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from engine_samples import CONTEXT, tiny_policy
from vllm import SamplingParams

from bridge.engine import VllmEngine
from bridge.stock_engine import StockEngine
from contracts.errors import BadConfig, PromptTooLong, UnsupportedModel, UnsupportedRequest, WeightDigestMismatch
from isojax import Policy, completion_rows, digest, pack
from isojax.export import export_checkpoint
from isojax.policy.native import native_policy
from isojax.rl.assemble import assemble
from isojax.rl.checkpoint_policy import load_checkpoint
from isojax.rl.config_file import parse_config
from isojax.rl.metrics import read_metrics
from isojax.rl.rollout import RolloutEngine, Sampling, open_engine
from isojax.rl.run_folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.long_file(60)]

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
TASK = """
def examples():
    return [{"tokens": [0, digit], "digit": digit} for digit in range(1, 5)]

def reward(example, tokens, text):
    return sum(token == example.fields["digit"] for token in tokens) / len(tokens)
"""


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """(engine, native policy, weights): Qwen3, with QK norms and an untied head.

    In float32, where a weight that did not arrive shows, and not the rounding of two stacks.
    """
    folder = tmp_path_factory.mktemp("policy") / "stock"
    biased, params = tiny_policy("float32", tied=False)
    policy = Policy(dataclasses.replace(biased.config, attention_bias=False), dtype="float32")
    params = {name: params[name] for name in policy.parameter_shapes}
    export_checkpoint(folder, policy, params, {})
    engine = open_engine("vllm", folder, arm="native", kv_cache_bytes=1 << 28, max_sequences=8)
    yield engine, native_policy(policy, CONTEXT), params
    engine.close()


def _largest_gap(policy, params, completions, temperature=1.0):
    sequences = [completion.prompt_tokens + completion.tokens for completion in completions]
    prompts = [len(completion.prompt_tokens) for completion in completions]
    batch = pack(sequences, prompts, **policy.packing)
    values = np.asarray(policy.log_probs(params, batch, temperature))
    gaps = [
        np.abs(values[completion_rows(batch, index)] - completion.log_probs).max()
        for index, completion in enumerate(completions)
    ]
    return max(gaps)


def _changed(params):
    """Every parameter another one: a sync that left any of them behind would show."""
    return {
        name: (value * 0.5 + 0.1 * jax.random.normal(jax.random.key(number), value.shape)).astype(value.dtype)
        for number, (name, value) in enumerate(sorted(params.items()))
    }


NEAR, FAR = 2e-3, 0.02
PROMPTS = [[5, 6, 7, 8], list(range(3, 60)), [9]]


def test_it_is_a_rollout_engine_of_no_contract(stock):
    engine, _, _ = stock
    assert isinstance(engine, StockEngine)
    assert {name for name in dir(RolloutEngine) if not name.startswith("_")} <= set(dir(engine))
    for ask in (engine.report, lambda: engine.contract):
        with pytest.raises(UnsupportedRequest, match="Stock kernels declare no rounding"):
            ask()


def test_it_samples_from_the_weights_that_were_synced_last(stock):
    engine, policy, params = stock
    sampling = Sampling(max_tokens=12, seed=4, samples=2)
    other = _changed(params)
    found = {}
    for name, weights in (("first", params), ("other", other), ("again", params)):
        assert engine.sync(weights) == digest(weights)
        found[name] = engine.generate(PROMPTS, sampling)
        assert [c.prompt_index for c in found[name]] == [0, 0, 1, 1, 2, 2]
        assert {c.weight_digest for c in found[name]} == {digest(weights)}
        assert _largest_gap(policy, weights, found[name]) < NEAR
    assert _largest_gap(policy, params, found["other"]) > FAR
    assert [c.tokens for c in found["first"]] == [c.tokens for c in found["again"]]


@pytest.mark.parametrize("left_out", ["embed", "layers.qkv", "layers.k_norm", "norms", "lm_head", "layers.down"])
def test_each_kind_of_parameter_arrives(stock, left_out):
    """The check above would see one that did not."""
    engine, policy, params = stock
    other = _changed(params)
    engine.sync(other)
    found = engine.generate(PROMPTS, Sampling(max_tokens=12, seed=4))
    assert _largest_gap(policy, other, found) < NEAR
    assert _largest_gap(policy, other | {left_out: params[left_out]}, found) > FAR


def test_log_probabilities_are_those_at_the_temperature_of_the_request(stock):
    engine, policy, params = stock
    engine.sync(params)
    found = engine.generate(PROMPTS, Sampling(max_tokens=12, seed=4, temperature=0.5))
    assert _largest_gap(policy, params, found, temperature=0.5) < NEAR
    assert _largest_gap(policy, params, found, temperature=1.0) > FAR


def test_no_sync_while_requests_run_and_no_sample_before_one(stock):
    engine, _, params = stock
    core = engine._llm.llm_engine
    core.add_request("other", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4))
    try:
        with pytest.raises(UnsupportedRequest, match="1 requests in flight"):
            engine.sync(params)
    finally:
        core.abort_request(list(core.output_processor.request_states), internal=True)
    engine.sync(params)
    engine._digest = None
    with pytest.raises(WeightDigestMismatch, match="no sync"):
        engine.generate(PROMPTS, Sampling(max_tokens=1))
    engine.sync(params)


def test_a_model_that_stock_vllm_computes_otherwise_is_refused(tmp_path):
    policy, params = tiny_policy("float32", tied=False)
    export_checkpoint(tmp_path / "biased", policy, params, {})
    with pytest.raises(UnsupportedModel, match="leaves the bias of Qwen3's output projection out"):
        StockEngine(tmp_path / "biased")
    config = dataclasses.replace(policy.config, attention_bias=False, head_dim=16)
    narrow = Policy(config, dtype="float32")
    export_checkpoint(tmp_path / "narrow", narrow, narrow.init(jax.random.key(0)), {})
    with pytest.raises(UnsupportedModel, match=r"head_dim: found 16; allowed: \[32, 64"):
        StockEngine(tmp_path / "narrow")


def test_what_it_cannot_do_is_refused_by_name(stock):
    engine, _, params = stock
    engine.sync(params)
    with pytest.raises(UnsupportedRequest, match="full_rows: found 3"):
        engine.generate(PROMPTS, Sampling(max_tokens=1), full_rows=3)
    with pytest.raises(PromptTooLong, match=r"prompts\[0\]"):
        engine.generate([list(range(CONTEXT))], Sampling(max_tokens=1))
    with pytest.raises(BadConfig, match=r"params\[norms\]"):
        engine.sync({name: value for name, value in params.items() if name != "norms"})
    for setting in ("separate_process", "sleep_mode"):
        with pytest.raises(BadConfig, match=rf"engine\.settings\.{setting}: found True; allowed: false in the native"):
            VllmEngine.native("folder", **{setting: True})


def test_a_whole_native_run_from_its_configuration(tmp_path):
    (tmp_path / "digits_task.py").write_text(TASK)
    values = {
        "name": "digits",
        "policy": {"arm": "native", "random": MODEL},
        "task": {"source": "function", "prompts": "digits_task:examples", "reward": "digits_task:reward"},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 4},
        "optimizer": {"learning_rate": 5e-3},
        "train": {"steps": 2, "micro_batch_tokens": 256},
        "check": {"on_mismatch": "record"},
        "engine": {"settings": {"kv_cache_bytes": 1 << 28}},
    }
    config = parse_config(values, source="test")
    folder = RunFolder(tmp_path / config.run_name)
    folder.path.mkdir()
    trainer = assemble(config, config_folder=tmp_path, folder=folder)
    try:
        assert trainer.contract is None
        assert trainer.policy.arm == "native"
        assert trainer.policy.packing["start_multiple"] == 64
        trainer.run(show_progress=False)
    finally:
        trainer.close()
    lines = read_metrics(folder.metrics)
    assert [line["arm"] for line in lines] == ["native", "native"]
    assert all(line["mismatch_max_abs"] < 0.1 for line in lines)
    assert sum(line["mismatch_tokens"] for line in lines) > 0
    assert not (folder.policy / "execution_contract.json").exists()
    assert json.loads((folder.policy / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    saved = load_checkpoint(folder.path)
    assert saved.weight_digest == lines[-1]["weight_digest"]
    assert saved.temperature == 1.0
