"""A vLLM server as a user starts it, what it answers over HTTP, and the comparison with the trainer's score."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from isojax.policy import Policy
from isojax.rl.check_rollout import score
from isojax.rl.mismatch import Mismatch, compare_tokens
from isojax.rl.rollout import Completion
from pallas_kernels.kernel_shapes import KernelShapes

START_SECONDS = 300
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
#: Requests outside of the contract's semantics that need no tokenizer: a field and its value.
REFUSED = (
    ("temperature", 0.5),
    ("top_p", 0.9),
    ("top_k", 5),
    ("min_p", 0.2),
    ("presence_penalty", 1.0),
    ("repetition_penalty", 1.2),
    ("logit_bias", {"5": 2.0}),
    ("min_tokens", 3),
)


@contextmanager
def serving(folder: Path, log: Path, *arguments: str, environment: Mapping[str, str] = ENVIRONMENT) -> Iterator[str]:
    """`vllm serve FOLDER` with these arguments, which runs until the end; yields its URL once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # What the `vllm` command runs, also where it is not on the path.
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--port", str(port)]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *arguments], env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=60)


def card_arguments(folder: Path, shapes: KernelShapes, *, free: float, cache_bytes: int) -> list[str]:
    """Of a server on a card: limits within what was sealed, since vLLM's own for a large card can be beyond, and a
    small part of the memory. free: the share of it that must be free at the start. Without a tokenizer, token ids only.
    """
    limits = {
        "--max-num-seqs": min(64, shapes.max_requests),
        "--max-num-batched-tokens": shapes.token_buckets[-1],
        "--max-model-len": shapes.max_context,
        "--gpu-memory-utilization": free,
        "--kv-cache-memory-bytes": cache_bytes,
    }
    found = [text for name, value in limits.items() for text in (name, str(value))]
    return found if (folder / "tokenizer.json").exists() else [*found, "--skip-tokenizer-init"]


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


def post(base: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and answer of a completion request."""
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def sampled(base: str, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> list[Completion]:
    """One completion a prompt, with the log-probabilities that the server reports."""
    body = {"prompt": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "seed": seed, "logprobs": 0}
    # Without the second, a server that has no tokenizer could not name the tokens that the values are of.
    status, answer = post(base, body | {"return_token_ids": True, "return_tokens_as_token_ids": True})
    assert status == 200, answer
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_completion(choice, prompt) for choice, prompt in zip(choices, prompts, strict=True)]


def _completion(choice: dict[str, Any], prompt: Sequence[int]) -> Completion:
    # JSON carries a float32 value as the shortest decimal of its double, which reads back exactly.
    values = np.array(choice["logprobs"]["token_logprobs"], np.float32)
    tokens = choice["token_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    assert values.shape == (len(tokens),)
    return Completion(choice["index"], tuple(prompt), tuple(tokens), values, choice["finish_reason"], "")


def against_trainer(
    completions: Sequence[Completion],
    policy: Policy,
    params: dict[str, jax.Array],
    *,
    temperature: float = 1.0,
    capacity: int = 1024,
) -> Mismatch:
    """Every reported value against the trainer's score of the same tokens. capacity: tokens of a packed batch."""
    return compare_tokens(completions, "trainer", score(policy, params, completions, temperature, capacity))


def require_refused(base: str, field: str, value: object, named: str) -> None:
    """The request is a 400 that names the field and what is allowed."""
    status, answer = post(base, {"prompt": [5, 6], "max_tokens": 4, field: value})
    assert status == 400, answer
    message = answer["error"]["message"]
    assert f"{named}: found" in message, message
    assert "allowed:" in message
