"""A tiny policy in real vLLM, and the trainer's values for what the engine sampled: shared by the engine tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge.engine import VllmEngine
from isojax import Policy, PolicyConfig, completion_rows, export_policy, pack
from isojax.policy import RopeConfig
from isojax.rl.rollout import Completion, Sampling

VOCABULARY = 300
CONTEXT = 256
STEP_TOKENS = 64
PADDED_TOKENS, PADDED_ROWS = 1024, 64
"""Sizes to which the trainer's batches are padded, so that one shape of each is compiled."""


@cache
def tiny_policy(dtype: str, *, tied: bool, seed: int = 0) -> tuple[Policy, dict[str, jax.Array]]:
    """Two layers. Tied: the llama family; untied: Qwen3, with QK norms and biases. Weights wide enough to be uneven.

    Kept, so that what JAX compiled for a policy serves every engine that runs it.
    """
    config = PolicyConfig(
        family="llama" if tied else "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=128,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        max_position=CONTEXT,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10000.0),
        attention_bias=not tied,
        tied_head=tied,
        eos_token_ids=(2,),
    )
    policy = Policy(config, dtype=dtype)
    params = policy.init(jax.random.key(seed), scale=0.3)
    # Norms of exactly 1 and biases of 0 would hide a missing multiply or add.
    for number, (name, value) in enumerate(sorted(params.items())):
        if "norm" in name or "bias" in name:
            noise = 0.2 * jax.random.normal(jax.random.key(100 + number), value.shape)
            params[name] = (value + noise).astype(value.dtype)
    return policy, params


@dataclass
class Running:
    """An engine and the policy that it serves."""

    engine: VllmEngine
    policy: Policy
    params: dict[str, jax.Array]
    folder: Path
    temperature: float = 1.0

    @property
    def cached_tokens(self) -> list[int]:
        """Prompt tokens that the last call found in the prefix cache, one count a request."""
        return self.engine.cached_tokens

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts of these lengths."""
        generator = np.random.default_rng(seed)
        return [generator.integers(3, VOCABULARY, length).tolist() for length in lengths]

    def sampling(self, max_tokens: int, seed: int) -> Sampling:
        """Sampling at the contract's temperature."""
        return Sampling(max_tokens=max_tokens, seed=seed, temperature=self.temperature)

    def trainer_score(
        self,
        completions: Sequence[Completion],
        params: dict[str, jax.Array] | None = None,
        temperature: float | None = None,
    ) -> Any:
        """`policy.log_probs` at every completion token: one fp32 array a completion."""
        batch = _packed(completions)
        values = np.asarray(self.policy.log_probs(params or self.params, batch, temperature or self.temperature))
        return [values[completion_rows(batch, index)] for index in range(len(completions))]

    def trainer_prompt_scores(self, prompts: Sequence[Sequence[int]]) -> Any:
        """`policy.log_probs` at every prompt token but the first: what `engine.score` returns."""
        return self.trainer_score(
            [
                Completion(index, tuple(prompt[:1]), tuple(prompt[1:]), np.zeros(0), "length", "")
                for index, prompt in enumerate(prompts)
            ]
        )

    def trainer_forward(self, completions: Sequence[Completion]) -> Any:
        """The same tokens from the forward inside of a value_and_grad: the trainer's training pass."""
        batch = _packed(completions)
        _, values = _value_and_grad(self.policy)(
            self.params, self.policy.buffers, batch, jax.numpy.float32(self.temperature)
        )
        return [np.asarray(values)[completion_rows(batch, index)] for index in range(len(completions))]

    def trainer_rows(self, completions: Sequence[Completion], params: dict[str, jax.Array] | None = None) -> Any:
        """Full rows of the trainer, in the order of `engine_rows`."""
        batch = _packed(completions)
        wanted = [
            completion_rows(batch, index)[place]
            for index, completion in enumerate(completions)
            for place in sorted(completion.rows or {})
        ]
        # One row count for all tests, since each is a compilation of the whole policy.
        padded = np.resize(wanted, PADDED_ROWS)
        rows = self.policy.log_prob_rows(params or self.params, batch, padded, self.temperature)
        return np.asarray(rows)[: len(wanted)]


def engine_rows(completions: Sequence[Completion]) -> np.ndarray:
    """All full rows that the engine returned, [N, V]."""
    return np.stack([row for completion in completions for _, row in sorted((completion.rows or {}).items())])


def bits(values: Any) -> np.ndarray:
    """Float32 values as integers: +0 and -0 differ, NaN equals itself."""
    return np.concatenate([np.ascontiguousarray(part, np.float32).reshape(-1) for part in values]).view(np.int32)


def same_bits(left: Any, right: Any) -> bool:
    """Whether two lists of fp32 arrays are equal bit for bit."""
    return np.array_equal(bits(left), bits(right))


@contextmanager
def running_engine(
    folder: Path, dtype: str, *, tied: bool, temperature: float = 1.0, **settings: Any
) -> Iterator[Running]:
    """A synced engine on a freshly exported tiny policy; closed at the end, since only one may run at a time."""
    policy, params = tiny_policy(dtype, tied=tied)
    export_policy(folder, policy, params, {}, temperature=temperature)
    engine = VllmEngine(
        folder, **{"max_step_tokens": STEP_TOKENS, "kv_cache_bytes": 8 << 20, "page_size": 16, **settings}
    )
    try:
        running = Running(engine, policy, params, folder, temperature)
        engine.report()
        engine.sync(params)
        yield running
    finally:
        engine.close()


def _packed(completions: Sequence[Completion]) -> Any:
    sequences = [completion.prompt_tokens + completion.tokens for completion in completions]
    lengths = [len(completion.prompt_tokens) for completion in completions]
    return pack(sequences, lengths, length_multiple=PADDED_TOKENS)


_compiled: dict[int, Any] = {}


def _value_and_grad(policy: Policy) -> Any:
    def loss(params: Any, buffers: Any, batch: Any, temperature: Any) -> Any:
        values = policy.score(params, buffers, batch, temperature)
        return values.sum(), values

    def both(*arguments: Any) -> Any:
        (value, values), gradients = jax.value_and_grad(loss, has_aux=True)(*arguments)
        # Returned, so that the backward and its recomputed forward are really there.
        return (value, gradients), values

    return _compiled.setdefault(id(policy), jax.jit(both))
