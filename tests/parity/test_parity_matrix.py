"""Engine against trainer, bit for bit: every path through the engine, both processes and dtypes, three batch sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_samples import STEP_TOKENS, Running, engine_rows, running_engine, same_bits

from contracts.errors import NonFiniteLogits
from isojax.rl.rollout import Completion

pytestmark = [pytest.mark.engine, pytest.mark.long_file(200)]

# Case 12: one of the dtypes at a temperature other than 1.
TEMPERATURE = {"bfloat16": 1.0, "float32": 0.6}
COMBINATIONS = [(process, dtype) for dtype in ("bfloat16", "float32") for process in ("in_process", "separate_process")]
BATCHES = (1, 3, 17)
TOKENS = 12


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def running(request, tmp_path_factory):
    """One engine for all tests of a (process, dtype); pytest groups them, so only one runs at a time."""
    process, dtype = request.param
    folder = tmp_path_factory.mktemp("policy") / "exported"
    with running_engine(
        folder,
        dtype,
        tied=dtype == "float32",
        temperature=TEMPERATURE[dtype],
        separate_process=process == "separate_process",
    ) as engine:
        yield engine


def _assert_parity(running: Running, completions: list[Completion]) -> None:
    """Sampled tokens against both trainer cases, and every full row over the whole vocabulary."""
    sampled = [completion.log_probs for completion in completions]
    assert same_bits(sampled, running.trainer_score(completions)), "engine and trainer_score differ"
    assert same_bits(sampled, running.trainer_forward(completions)), "engine and trainer_fwd differ"
    rows = engine_rows(completions)
    assert rows.shape == (sum(len(completion.rows or {}) for completion in completions), rows.shape[1])
    assert same_bits(rows, running.trainer_rows(completions)), "full rows differ"


def _lengths(batch: int, longest: int = 40) -> list[int]:
    """Uneven prompt lengths, a single token among them."""
    return [1 + (7 * index + 5) % longest if index else longest for index in range(batch)]


@pytest.mark.parametrize("batch", BATCHES)
def test_prefill_equals_the_trainer(running, batch):
    prompts = running.prompts(_lengths(batch), seed=batch)
    completions = running.engine.generate(prompts, running.sampling(1, seed=1), full_rows=batch)
    assert [len(completion.rows or {}) for completion in completions] == [1] * batch
    _assert_parity(running, completions)
    if running.temperature != 1:
        sampled = [completion.log_probs for completion in completions]
        assert not same_bits(sampled, running.trainer_score(completions, temperature=1.0))


@pytest.mark.parametrize("batch", BATCHES)
def test_scores_of_prompts_equal_the_trainer(running, batch):
    lengths = [150, *_lengths(batch)[1:]]  # the first in three chunks
    prompts = [prompt for prompt in running.prompts(lengths, seed=50 + batch) if len(prompt) > 1]
    scores = running.engine.score(prompts)
    assert [len(score) for score in scores] == [len(prompt) - 1 for prompt in prompts]
    assert same_bits(scores, running.trainer_prompt_scores(prompts))


@pytest.mark.parametrize("batch", BATCHES)
def test_chunked_prefill_equals_the_trainer(running, batch):
    prompts = running.prompts([150, *_lengths(batch)[1:]], seed=100 + batch)
    assert len(prompts[0]) > 2 * STEP_TOKENS, "the prompt must not fit into two steps"
    _assert_parity(running, running.engine.generate(prompts, running.sampling(3, seed=2), full_rows=6))


@pytest.mark.parametrize("batch", BATCHES)
def test_a_prefix_cache_hit_equals_the_trainer(running, batch):
    prompts = running.prompts([50] * batch, seed=200 + batch)
    sampling = running.sampling(3, seed=3)
    first = running.engine.generate(prompts, sampling)
    assert running.cached_tokens == [0] * batch
    second = running.engine.generate(prompts, sampling, full_rows=6)
    assert min(running.cached_tokens) >= 48, "every prompt must have met its cached pages"
    assert [completion.tokens for completion in first] == [completion.tokens for completion in second]
    _assert_parity(running, second)


@pytest.mark.parametrize("batch", BATCHES)
def test_decode_equals_the_trainer(running, batch):
    prompts = running.prompts(_lengths(batch, longest=20), seed=300 + batch)
    completions = running.engine.generate(prompts, running.sampling(TOKENS, seed=4), full_rows=3 * batch)
    assert all(len(completion.tokens) == TOKENS for completion in completions)
    assert any(place > 0 for completion in completions for place in completion.rows or {})
    _assert_parity(running, completions)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_preempted_and_resumed_request_equals_the_trainer(running, batch):
    prompts = running.prompts(_lengths(batch), seed=400 + batch)
    with _preempting(running.engine, after_steps=6) as preempted:
        completions = running.engine.generate(prompts, running.sampling(TOKENS, seed=5), full_rows=3 * batch)
    assert preempted == [batch], "all requests must have been running when they were preempted"
    undisturbed = running.engine.generate(prompts, running.sampling(TOKENS, seed=5))
    assert [c.tokens for c in completions] == [c.tokens for c in undisturbed], "the draws depend on the preemption"
    _assert_parity(running, completions)


def test_a_nan_in_the_weights_is_named_and_the_engine_goes_on(running):
    name = "layers.down"
    broken = dict(running.params)
    broken[name] = broken[name].at[1, 5, 7].set(np.nan)
    running.engine.sync(broken)
    with pytest.raises(NonFiniteLogits, match=r"prompt 0, sample 0, position 4, region layers_1_matmul_2"):
        running.engine.generate(running.prompts([5, 9], seed=1), running.sampling(4, seed=1))
    running.engine.sync(running.params)
    _assert_parity(
        running, running.engine.generate(running.prompts([5, 9], seed=1), running.sampling(4, seed=1), full_rows=4)
    )


class _preempting:
    """Makes vLLM preempt every running request once, after some steps: it drops their pages and computes them again."""

    def __init__(self, engine: Any, after_steps: int) -> None:
        self._engine = engine._llm.llm_engine
        self._step = self._engine.step
        self._left = after_steps
        self.preempted: list[int] = []

    def __enter__(self) -> list[int]:
        self._engine.step = self._counted
        return self.preempted

    def __exit__(self, *exception: Any) -> None:
        self._engine.step = self._step

    def _counted(self) -> Any:
        self._left -= 1
        if self._left == 0:
            self.preempted.append(self._engine.get_num_unfinished_requests())
            assert self._engine.reset_prefix_cache(reset_running_requests=True)
        return self._step()
