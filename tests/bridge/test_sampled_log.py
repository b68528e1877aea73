"""The log of what was sampled: every drawn token with its value, whoever's row it was, read once at the end."""

import numpy as np
import pytest
import torch

from bridge.batch_view import NO_RECORD
from bridge.device_sampling import StepRows
from bridge.sampled_log import SampledLog, logged_values

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
