"""The log of what was sampled: every drawn token with its value, whoever's row it was, read once at the end."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bridge.batch_view import NO_RECORD
from bridge.device_sampling import StepRows
from bridge.engine import VllmEngine
from bridge.sampled_log import SampledLog, logged_values
from isojax.rl.rollout import Sampling

VOCABULARY = 7


def _rows(records: list[int], indices: list[int], sampled: list[bool]) -> StepRows:
    count = len(records)
    return StepRows(
        records_N=np.array(records, np.int64),
        token_indices_N=np.array(indices, np.int64),
        sampled_N=np.array(sampled, np.bool_),
        seeds_N=np.zeros(count, np.uint64),
        greedy_N=np.zeros(count, np.bool_),
    )


def _step(log: SampledLog, records: list[int], indices: list[int], sampled: list[bool], seed: int) -> dict:
    """A step of random rows and draws; what it drew and the values, by (record, index)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand((len(records), VOCABULARY), generator=generator)
    drawn = torch.randint(VOCABULARY, (len(records),), generator=generator)
    log.add(values, drawn, _rows(records, indices, sampled))
    kept = {
        place: (int(token), float(values[row, token]))
        for row, (place, token) in enumerate(zip(zip(records, indices, strict=True), drawn, strict=True))
    }
    # vLLM goes on to overwrite them.
    values.fill_(-1.0)
    drawn.fill_(-1)
    return kept


@pytest.mark.parametrize("capacity", [4, 6, 1024])
def test_values_are_found_by_request_and_token_however_the_steps_were_cut(capacity):
    log = SampledLog(capacity)
    steps = [
        # A chunk that ends before its prompt does, then somebody else's request beside ours.
        ([0, 1], [0, -5], [True, False]),
        ([0, 1, NO_RECORD], [1, 0, 3], [True, True, True]),
        ([2, 1, 0], [0, 1, 2], [True, True, True]),
    ]
    kept = {}
    for seed, step in enumerate(steps):
        kept |= _step(log, *step, seed)
    tokens = [[kept[request, index][0] for index in range(length)] for request, length in enumerate([3, 2, 1])]
    found = logged_values(log.take(), tokens)
    assert [row.dtype for row in found] == [np.float32] * 3
    assert [row.tolist() for row in found] == [
        [kept[request, index][1] for index in range(length)] for request, length in enumerate([3, 2, 1])
    ]
    # Taken is taken.
    assert [row.tolist() for row in logged_values(log.take(), [[], []])] == [[], []]


def test_a_row_behind_the_last_token_is_left_out():
    log = SampledLog()
    kept = _step(log, [0, 1], [0, 0], [True, True], 0) | _step(log, [0, 1], [1, 1], [True, True], 1)
    tokens = [[kept[0, 0][0]], [kept[1, 0][0], kept[1, 1][0]]]
    found = logged_values(log.take(), tokens)
    assert [row.tolist() for row in found] == [[kept[0, 0][1]], [kept[1, 0][1], kept[1, 1][1]]]


def test_a_token_that_was_drawn_again_has_its_last_value():
    log = SampledLog()
    _step(log, [0], [0], [True], 0)
    kept = _step(log, [0], [0], [True], 1)
    assert logged_values(log.take(), [[kept[0, 0][0]]])[0].tolist() == [kept[0, 0][1]]


@pytest.mark.parametrize("wrong", [(1, 0), (0, 1)])
def test_a_token_that_nobody_drew_is_refused_by_request_and_place(wrong):
    log = SampledLog()
    kept = _step(log, [0, 1], [0, 0], [True, True], 0) | _step(log, [0, 1], [1, 1], [True, True], 1)
    tokens = [[kept[request, index][0] for index in range(2)] for request in range(2)]
    request, place = wrong
    tokens[request][place] += 1
    with pytest.raises(RuntimeError, match=f"token {place} of request {request} came back as"):
        logged_values(log.take(), tokens)


def test_a_token_without_a_draw_is_refused():
    log = SampledLog()
    kept = _step(log, [0], [0], [True], 0)
    with pytest.raises(RuntimeError, match="token 1 of request 0 came back as 3 and was drawn as -1"):
        logged_values(log.take(), [[kept[0, 0][0], 3]])


class _Worker:
    """Stands for the worker of a card: keeps a log while it is asked to, and may end with the process that it is in."""

    def __init__(self):
        self.log, self.tap, self.ended = None, 0, False

    def collective_rpc(self, method, args=()):
        assert not self.ended, f"{method} would wait for ever"
        return [getattr(self, method)(*args)]

    def isojax_log_sampled(self, on):
        self.log = SampledLog() if on else None
        return True

    def isojax_tap_rows(self, limit, seed):
        self.tap = limit

    def isojax_take_sampled(self):
        return self.log.take()

    def isojax_take_rows(self):
        return {"rows": b"", "width": VOCABULARY, "records": [], "token_indices": []}

    def isojax_take_faults(self):
        return []


def _engine(monkeypatch, worker: _Worker, *, separate: bool) -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = SimpleNamespace(separate_process=separate)
    engine._llm, engine._asleep = worker, False
    monkeypatch.setattr(engine, "_require_ready", lambda: "digest")
    monkeypatch.setattr(engine, "_checked_ids", lambda prompts, sampling: prompts)
    monkeypatch.setattr(engine, "_check_served", lambda: None)
    monkeypatch.setattr(engine, "_run", lambda tokens, params: _sampled(worker, tokens, params))
    return engine


def _sampled(worker: _Worker, prompts, params):
    """One token of each prompt, drawn and returned."""
    assert [wanted.logprobs for wanted in params] == [None] * len(prompts)
    assert worker.log is not None
    kept = _step(worker.log, list(range(len(prompts))), [0] * len(prompts), [True] * len(prompts), 0)
    return [
        SimpleNamespace(
            prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=[kept[at, 0][0]], finish_reason="length")]
        )
        for at, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("rows", [0, 2])
def test_the_next_call_is_right_after_one_that_was_interrupted(monkeypatch, separate, rows):
    worker, sampling = _Worker(), Sampling(max_tokens=1, seed=1)
    engine = _engine(monkeypatch, worker, separate=separate)
    run = engine._run

    def interrupted(tokens, params):
        run(tokens, params)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[3], [4], [5]], sampling, full_rows=rows)
    if not separate:
        assert (worker.log, worker.tap) == (None, 0)
    (completion,) = engine.generate([[3]], sampling)
    assert completion.log_probs.shape == (1,)
    assert (worker.log, worker.tap) == (None, 0)


@pytest.mark.parametrize("rows", [0, 2])
def test_an_engine_that_ended_with_ctrl_c_is_asked_nothing(monkeypatch, rows):
    """A process of its own is of the terminal's group, as this one."""
    worker = _Worker()
    engine = _engine(monkeypatch, worker, separate=True)

    def ended(tokens, params):
        worker.ended = True
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_run", ended)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[3]], Sampling(max_tokens=1, seed=1), full_rows=rows)
