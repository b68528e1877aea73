"""Sleeping and waking up as VllmEngine keeps count of it: what it refuses, and when weights count as known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_samples import same_bits

from bridge.engine import VllmEngine
from contracts.errors import BadConfig, UnsupportedRequest, WeightDigestMismatch
from isojax.rl.rollout import Sampling

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("original_weights")]


def _model(running):
    return running.engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()


@pytest.fixture
def sleeper(running, monkeypatch):
    """The engine as one on a card: what vLLM was told, in order. The memory itself is tested on a card."""
    told = []
    monkeypatch.setattr(running.engine, "options", dataclasses.replace(running.engine.options, sleep_mode=True))
    monkeypatch.setattr(running.engine._llm, "sleep", lambda level: told.append(f"sleep {level}"))
    monkeypatch.setattr(running.engine._llm, "wake_up", lambda: told.append("wake up"))
    yield running, told
    running.engine.wake_up()


def test_asleep_it_refuses_everything_and_awake_it_gives_the_same_bits(sleeper):
    running, told = sleeper
    prompts, sampling = running.prompts([6, 30], seed=9), Sampling(max_tokens=4, seed=9)
    before = running.engine.generate(prompts, sampling)
    running.engine.sleep()
    for call in (
        lambda: running.engine.generate(prompts, sampling),
        lambda: running.engine.score(prompts),
        lambda: running.engine.sync(running.params),
        running.engine.report,
        running.engine.sleep,
    ):
        with pytest.raises(UnsupportedRequest, match=r"engine: found asleep; allowed: awake"):
            call()
    running.engine.wake_up()
    after = running.engine.generate(prompts, sampling)
    assert told == ["sleep 1", "wake up"]
    assert running.cached_tokens == [0, 0]
    assert [completion.tokens for completion in after] == [completion.tokens for completion in before]
    assert same_bits([c.log_probs for c in after], [c.log_probs for c in before])


def test_after_a_deep_sleep_nothing_is_sampled_before_a_sync(sleeper):
    running, told = sleeper
    prompts, sampling = running.prompts([6], seed=9), Sampling(max_tokens=2, seed=9)
    before = running.engine.generate(prompts, sampling)
    running.engine.sleep(2)
    running.engine.wake_up()
    assert told == ["sleep 2", "wake up"]
    with pytest.raises(WeightDigestMismatch, match=r"weights: found no successful sync"):
        running.engine.generate(prompts, sampling)
    running.engine.sync(running.params)
    assert same_bits([running.engine.generate(prompts, sampling)[0].log_probs], [before[0].log_probs])


def test_weights_that_a_sleep_has_changed_are_found(sleeper):
    running, _ = sleeper
    running.engine.sleep()
    _model(running).weights.tensor("embed", torch.bfloat16).view(torch.int16)[5, 3] ^= 1
    with pytest.raises(WeightDigestMismatch, match="after waking up"):
        running.engine.wake_up()
    with pytest.raises(WeightDigestMismatch, match="no successful sync"):
        running.engine.generate(running.prompts([4], seed=1), Sampling(max_tokens=1, seed=1))


@pytest.mark.parametrize(("mode", "level"), [(False, 1), (True, 0), (True, 3)])
def test_a_sleep_that_was_not_prepared_or_does_not_exist_is_refused(running, monkeypatch, mode, level):
    monkeypatch.setattr(running.engine, "options", dataclasses.replace(running.engine.options, sleep_mode=mode))
    with pytest.raises(UnsupportedRequest, match=rf"sleep: found level {level}.*started with sleep_mode"):
        running.engine.sleep(level)


def test_no_engine_on_a_cpu_is_started_to_sleep(running):
    with pytest.raises(BadConfig, match=r"engine\.settings\.sleep_mode: found True; allowed: false on a CPU"):
        VllmEngine(running.folder, sleep_mode=True)
