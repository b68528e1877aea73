"""Plain `vllm serve FOLDER`: the OpenAI API returns the trainer's log-probabilities and refuses by name."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from engine_samples import PADDED_TOKENS, STEP_TOKENS, VOCABULARY, same_bits, tiny_policy
from tokenizers import Tokenizer, models, pre_tokenizers

from isojax import completion_rows, export_policy, pack

pytestmark = [pytest.mark.engine, pytest.mark.long_file]

START_SECONDS = 300


def _tokenizer_files() -> dict[str, bytes]:
    """One word a token: w0 w1 and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(base URL, policy, params) of a server that was started like a user would."""
    folder = tmp_path_factory.mktemp("policy") / "exported"
    policy, params = tiny_policy("bfloat16", tied=False)
    export_policy(folder, policy, params, _tokenizer_files())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder.parent / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            # Steps of so few tokens that the longest prompt below needs several.
            [
                *(str(Path(sys.executable).parent / "vllm"), "serve", str(folder), "--port", str(port)),
                *("--max-num-batched-tokens", str(STEP_TOKENS)),
            ],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}", policy, params
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait_until_healthy(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(log.read_text()[-4000:])


def _post(base: str, body: dict) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_log_probabilities_over_http_equal_the_trainers(served):
    base, policy, params = served
    prompts = [np.random.default_rng(index).integers(3, VOCABULARY, 20 + index).tolist() for index in range(3)]
    status, answer = _post(
        base, {"prompt": prompts, "max_tokens": 8, "seed": 5, "logprobs": 0, "return_token_ids": True}
    )
    assert status == 200, answer
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    tokens = [choice["token_ids"] for choice in choices]
    assert all(len(ids) == 8 or ids[-1] == 2 for ids in tokens)
    # JSON carries a float32 value as the shortest decimal of its double, which reads back exactly.
    reported = [np.array(choice["logprobs"]["token_logprobs"], np.float32) for choice in choices]
    sequences = [prompt + ids for prompt, ids in zip(prompts, tokens, strict=True)]
    batch = pack(sequences, [len(prompt) for prompt in prompts], length_multiple=PADDED_TOKENS)
    values = np.asarray(policy.log_probs(params, batch))
    assert same_bits(reported, [values[completion_rows(batch, index)] for index in range(len(prompts))])


def test_the_same_seed_gives_the_same_tokens_also_with_a_chunked_prompt(served):
    base, _, _ = served
    body = {"prompt": [5] * 200, "max_tokens": 6, "seed": 9, "temperature": 1.0, "return_token_ids": True}
    answers = [_post(base, body)[1]["choices"][0]["token_ids"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert _post(base, {**body, "seed": 10})[1]["choices"][0]["token_ids"] != answers[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.2),
        ("presence_penalty", 1.0),
        ("repetition_penalty", 1.2),
        ("logit_bias", {"5": 2.0}),
        ("min_tokens", 3),
        ("bad_words", ["w5"]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_request_outside_the_semantics_is_a_400_with_the_reason(served, field, value):
    base, _, _ = served
    status, answer = _post(base, {"prompt": [5, 6], "max_tokens": 4, field: value})
    assert status == 400
    message = answer["error"]["message"]
    named = {"response_format": "structured_outputs"}.get(field, field)
    assert message.startswith(f"{named}: found"), message
    assert "allowed:" in message


def test_a_prompt_beyond_the_context_is_a_400(served):
    base, _, _ = served
    status, answer = _post(base, {"prompt": [5] * 300, "max_tokens": 4})
    assert status == 400
    assert "256" in answer["error"]["message"]
