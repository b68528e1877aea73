"""A rollout engine for tests: the policy's own forward, recomputed for every token, and NumPy sampling."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.policy.policy import Policy
from isojax.rl.rollout import Completion, Sampling, request_seed
from isojax.weights.digest import digest


class ReferenceEngine:
    """Implements `RolloutEngine` in a few lines; slow, exact, and with knobs that break it on purpose.

    tamper: changes a list of completions before they are returned. runs_beside_trainer: whether it says that it may.
    """

    def __init__(self, policy: Policy, contract: Any, report: Any = None) -> None:
        self.policy, self.contract, self._report = policy, contract, report
        self.params: dict[str, jax.Array] = {}
        self.weight_digest = ""
        self.tamper = lambda completions: completions
        self.closed = False
        self.runs_beside_trainer = False
        self.calls: list[Sampling] = []
        self.threads: list[str] = []

    def sync(self, params: Mapping[str, jax.Array]) -> str:
        self.params = {name: jax.device_put(value, jax.devices()[0], may_alias=False) for name, value in params.items()}
        self.weight_digest = digest(self.params)
        return self.weight_digest

    def report(self) -> Any:
        return self._report

    def close(self) -> None:
        self.closed = True

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, full_rows: int = 0) -> list[Completion]:
        self.calls.append(sampling)
        self.threads.append(threading.current_thread().name)
        requests = [(index, sample) for index in range(len(prompts)) for sample in range(sampling.samples)]
        seed = sampling.seed if sampling.seed is not None else int(np.random.default_rng().integers(2**62))
        random = [np.random.default_rng(request_seed(seed, *request)) for request in requests]
        # Rounded up, so that calls of about one size are compiled once; what is behind a token moves no bit of it.
        length = -(-(max(map(len, prompts)) + sampling.max_tokens) // 8) * 8
        histories = [list(prompts[index]) for index, _ in requests]
        rows: list[list[np.ndarray]] = [[] for _ in requests]
        alive = set(range(len(requests)))
        for _ in range(sampling.max_tokens):
            step_rows = self._rows(histories, length, sampling.temperature)
            for number in sorted(alive):
                row = step_rows[number]
                token = int(np.argmax(row if sampling.greedy else row + random[number].gumbel(size=row.shape)))
                histories[number].append(token)
                rows[number].append(row)
                if token in sampling.stop_token_ids:
                    alive.discard(number)
        completions = []
        budget = full_rows
        for number, (index, _) in enumerate(requests):
            prompt = tuple(prompts[index])
            tokens = tuple(histories[number][len(prompt) :])
            kept = dict(enumerate(rows[number][: -(-budget // (len(requests) - number))])) if budget else {}
            budget -= len(kept)
            completions.append(
                Completion(
                    prompt_index=index,
                    prompt_tokens=prompt,
                    tokens=tokens,
                    log_probs=np.array(
                        [row[token] for row, token in zip(rows[number], tokens, strict=True)], np.float32
                    ),
                    finish_reason="stop" if tokens[-1] in sampling.stop_token_ids else "length",
                    weight_digest=self.weight_digest,
                    rows=kept or None,
                )
            )
        return self.tamper(completions)

    def _rows(self, histories: list[list[int]], length: int, temperature: float) -> np.ndarray:
        """The next token's full row of every history, fp32 [R, V]."""
        count = -(-len(histories) // 8) * 8
        tokens = np.zeros((count, length), np.int32)
        for number, history in enumerate(histories):
            tokens[number, : len(history)] = history
        last = np.zeros(count, np.int32)
        last[: len(histories)] = [number * length + len(history) - 1 for number, history in enumerate(histories)]
        positions = np.tile(np.arange(length, dtype=np.int32), count)
        segments = np.repeat(np.arange(count, dtype=np.int32), length)
        return np.asarray(
            _next_rows(self.policy)(
                self.params,
                self.policy.buffers,
                tokens.reshape(-1),
                positions,
                segments,
                last,
                jnp.float32(temperature),
            )
        )


_COMPILED: dict[int, Any] = {}


def _next_rows(policy: Policy) -> Any:
    """Compiled once a policy, however many engines there are."""

    def rows(params, buffers, tokens, positions, segments, last, temperature):
        return policy.head_rows(params, policy.hidden(params, buffers, tokens, positions, segments)[last], temperature)

    return _COMPILED.setdefault(id(policy), jax.jit(rows))


def one_bit_off(completion: Completion, place: int) -> Completion:
    """The completion with the last bit of one log-probability flipped."""
    log_probs = completion.log_probs.copy()
    log_probs.view(np.int32)[place] ^= 1
    return dataclasses.replace(completion, log_probs=log_probs)
