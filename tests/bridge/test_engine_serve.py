"""Plain `vllm serve FOLDER`: the OpenAI API returns the trainer's log-probabilities and refuses by name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from engine_samples import STEP_TOKENS, VOCABULARY, tiny_policy
from served import ENVIRONMENT, REFUSED, against_trainer, card_arguments, post, require_refused, sampled, serving
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from bridge.start import FREE_AT_START
from isojax import export_policy
from pallas_kernels.kernel_shapes import KernelShapes

pytestmark = [pytest.mark.engine, pytest.mark.long_file(50)]


def _tokenizer_files() -> dict[str, bytes]:
    """One word a token: w0 w1 and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(base URL, policy, params) of a server that was started as a user would, but for its small steps."""
    folder = tmp_path_factory.mktemp("policy") / "exported"
    policy, params = tiny_policy("bfloat16", tied=False)
    export_policy(folder, policy, params, _tokenizer_files())
    environment = ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    # Steps of so few tokens that the longest prompt below needs several.
    steps = ("--max-num-batched-tokens", str(STEP_TOKENS))
    with serving(folder, folder.parent / "server.log", *steps, environment=environment) as base:
        yield base, policy, params


def test_log_probabilities_over_http_equal_the_trainers(served):
    base, policy, params = served
    prompts = [np.random.default_rng(index).integers(3, VOCABULARY, 20 + index).tolist() for index in range(3)]
    completions = sampled(base, prompts, 8, seed=5)
    assert all(len(completion.tokens) == 8 or completion.tokens[-1] == 2 for completion in completions)
    found = against_trainer(completions, policy, params)
    assert found.tokens == sum(len(completion.tokens) for completion in completions)
    found.require_exact(0)
    # The comparison sees the last bit.
    values = completions[1].log_probs.copy()
    values.view(np.int32)[3] ^= 1
    off = [*completions[:1], dataclasses.replace(completions[1], log_probs=values), *completions[2:]]
    assert against_trainer(off, policy, params).wrong == {(1, 3)}


def test_the_same_seed_gives_the_same_tokens_also_with_a_chunked_prompt(served):
    base, _, _ = served
    body = {"prompt": [5] * 200, "max_tokens": 6, "seed": 9, "temperature": 1.0, "return_token_ids": True}
    answers = [post(base, body)[1]["choices"][0]["token_ids"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert post(base, {**body, "seed": 10})[1]["choices"][0]["token_ids"] != answers[0]


@pytest.mark.parametrize(
    ("field", "value"), [*REFUSED, ("bad_words", ["w5"]), ("response_format", {"type": "json_object"})]
)
def test_a_request_outside_the_semantics_is_a_400_with_the_reason(served, field, value):
    require_refused(served[0], field, value, {"response_format": "structured_outputs"}.get(field, field))


def test_a_prompt_beyond_the_context_is_a_400(served):
    base, _, _ = served
    status, answer = post(base, {"prompt": [5] * 300, "max_tokens": 4})
    assert status == 400
    assert "256" in answer["error"]["message"]


@pytest.mark.parametrize("tokenizer", [True, False])
def test_vllm_takes_the_arguments_of_a_server_on_a_card(tmp_path, tokenizer):
    if tokenizer:
        (tmp_path / "tokenizer.json").touch()
    shapes = KernelShapes(token_buckets=(8, 512), max_requests=16, max_context=2048)
    arguments = card_arguments(tmp_path, shapes, free=FREE_AT_START, cache_bytes=1 << 30)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([*arguments, "--enforce-eager"])
    assert (parsed.max_num_seqs, parsed.max_num_batched_tokens, parsed.max_model_len) == (16, 512, 2048)
    assert (parsed.gpu_memory_utilization, parsed.kv_cache_memory_bytes) == (FREE_AT_START, 1 << 30)
    assert parsed.skip_tokenizer_init != tokenizer
