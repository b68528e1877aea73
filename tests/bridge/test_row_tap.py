"""The row tap: a uniform sample of sampled rows that stays where it was computed, and what a caller gets of it."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bridge.batch_view import NO_RECORD
from bridge.completions import rows_by_request, tapped_rows
from bridge.engine import VllmEngine
from bridge.row_tap import RowTap
from contracts.errors import UnsupportedRequest
from isojax.rl.rollout import Sampling

VOCABULARY = 5


def _offer(tap: RowTap, requests: int, steps: int) -> None:
    """Steps of decoding; the row of request r at step s is filled with 100 r + s. Each first step ends a chunk."""
    for step in range(-1, steps):
        rows = torch.tensor([[100.0 * request + step] * VOCABULARY for request in range(requests)])
        # The last request comes from elsewhere: nothing of it is kept.
        rows = torch.cat([rows, torch.full((1, VOCABULARY), -2.0)])
        records = np.array([*range(requests), NO_RECORD])
        tap.offer(rows, records, np.full(requests + 1, step), np.full(requests + 1, step >= 0))
        # vLLM goes on to overwrite them.
        rows.fill_(-1.0)


def test_rows_are_copied_and_known_by_request_and_token():
    tap = RowTap(limit=64, seed=0)
    _offer(tap, requests=3, steps=4)
    found = rows_by_request(tap.take())
    assert {(r, s): row.tolist() for r, rows in found.items() for s, row in rows.items()} == {
        (r, s): [100.0 * r + s] * VOCABULARY for r in range(3) for s in range(4)
    }
    assert tap.take()["records"] == []


def test_rows_on_the_device_are_the_same_ones_without_those_behind_the_last_token():
    tap = RowTap(limit=64, seed=0)
    _offer(tap, requests=3, steps=4)
    tapped = tapped_rows(tap.take_on_device(), lengths=[4, 2, 4])
    assert tapped.rows.shape == (64, VOCABULARY)
    assert tapped.chunk_ends == 3
    places = list(zip(tapped.completions, tapped.token_indices, strict=True))
    assert sorted(places) == [(r, s) for r, length in enumerate([4, 2, 4]) for s in range(length)]
    for slot, (request, step) in zip(tapped.slots, places, strict=True):
        assert tapped.rows[slot].tolist() == [100.0 * request + step] * VOCABULARY


def test_the_sample_has_its_size_and_favours_no_token():
    seen: Counter[int] = Counter()
    for seed in range(300):
        tap = RowTap(limit=5, seed=seed)
        _offer(tap, requests=1, steps=20)
        taken = tap.take_on_device()
        assert len(set(taken["token_indices"])) == 5
        for slot, step in enumerate(taken["token_indices"]):
            assert taken["rows"][slot, 0] == step
        seen.update(taken["token_indices"])
    # 75 of each are expected, with a deviation of 7.5.
    assert set(seen) == set(range(20))
    assert np.ptp(list(seen.values())) < 60


def test_rows_of_another_process_cannot_stay_on_its_device():
    engine = VllmEngine.__new__(VllmEngine)
    engine.options = SimpleNamespace(separate_process=True)
    engine._require_ready = lambda: ""
    with pytest.raises(UnsupportedRequest, match="rows_on_device"):
        engine.generate([[1]], Sampling(max_tokens=1), full_rows=1, rows_on_device=True)
