"""Configurations: what is written is what is run, and every mistake is one readable refusal."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from rl_samples import raw_run, run_config

from contracts.errors import BadConfig, UnsupportedRequest
from isojax.rl.config_file import load_config, parse_config

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["smollm2_arithmetic", "tiny_copy", "tiny_copy_card"])
def test_the_examples_load(name):
    assert load_config(EXAMPLES / f"{name}.toml").name == name


def test_the_demo_compares_at_least_two_hundred_full_rows():
    config = load_config(EXAMPLES / "smollm2_arithmetic.toml")
    assert config.train.steps * config.check.full_rows >= 200
    assert config.check.on_mismatch == "stop"


def test_an_unknown_key_names_the_key_the_file_the_allowed_keys_and_the_nearest(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 1\nmicrobatch_tokens = 4\n")
    with pytest.raises(BadConfig) as refusal:
        load_config(file)
    # Missing sections come first; put them there and the unknown key is named.
    assert str(file) in str(refusal.value)
    with pytest.raises(BadConfig) as refusal:
        parse_config(raw_run(train={"microbatch_tokens": 4}), source=str(file))
    text = str(refusal.value)
    for part in ("train.microbatch_tokens", str(file), "checkpoint_every", "Did you mean 'micro_batch_tokens'?"):
        assert part in text


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        ("rollout", {"group_size": 1}, "rollout.group_size"),
        ("rollout", {"group_size": "4"}, "rollout.group_size"),
        ("rollout", {"temperature": 0.0}, "rollout.temperature"),
        ("rollout", {"temperature": float("nan")}, "rollout.temperature"),
        ("rollout", {"temperature": 1e-50}, "rollout.temperature"),
        ("rollout", {"temperature": 1e39}, "rollout.temperature"),
        ("policy", {"random_seed": 2**70}, "policy.random_seed"),
        ("policy", {"source": "folder"}, "exactly one of"),
        ("policy", {"dtype": "float8"}, "policy.dtype"),
        ("task", {"source": "jsonl"}, "path"),
        ("algorithm", {"minibatches": 3}, "must divide"),
        ("algorithm", {"name": "ppo"}, "algorithm.name"),
        ("optimizer", {"learning_rate": -1.0}, "optimizer.learning_rate"),
        ("check", {"on_mismatch": "ignore"}, "check.on_mismatch"),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(section, values, says):
    with pytest.raises(BadConfig, match=says.replace(".", r"\.")):
        run_config(**{section: values})


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "min_tokens"])
def test_sampling_filters_are_refused_with_the_reason(name):
    """trl#6789: a filter renormalises the rollout's log-probabilities by the kept mass, and nobody else's."""
    with pytest.raises(UnsupportedRequest, match="log_softmax") as refusal:
        run_config(rollout={name: 0.9})
    assert f"rollout.{name}" in refusal.value.field


@pytest.mark.parametrize(
    ("content", "says"), [(b"steps = [", "valid TOML"), (b"\xff\xfe", "readable TOML"), (None, "readable TOML")]
)
def test_files_that_are_not_toml_are_refused(tmp_path, content, says):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadConfig, match=says):
        load_config(file)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        run_config().train.steps = 5


def test_numbers_and_lists_arrive_as_they_were_written():
    config = run_config(rollout={"stop_token_ids": [1, 2]}, optimizer={"learning_rate": 1})
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.optimizer.learning_rate == 1.0
    assert config.policy.random["architectures"] == ["LlamaForCausalLM"]
