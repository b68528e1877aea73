"""The comparison of an engine with the trainer counts every difference, in sampled tokens and in full rows."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from isojax.evidence.engine_parity import ROWS_AT_ONCE, compare_with_trainer
from isojax.rl.rollout import Completion, TappedRows

VOCABULARY = 50


class Trainer:
    """Stands in for a policy: a fixed row for every position of a packed batch."""

    def __init__(self) -> None:
        self.row_counts: set[int] = set()

    def rows(self, batch) -> np.ndarray:
        generator = np.random.default_rng(0)
        table = generator.normal(size=(200, VOCABULARY)).astype(np.float32)
        table -= np.log(np.exp(table).sum(1, keepdims=True))
        return table[(batch.tokens * 3 + batch.positions) % 200]

    def log_probs(self, params, batch, temperature):
        return self.rows(batch)[np.arange(len(batch.tokens)), batch.targets]

    def log_prob_rows(self, params, batch, rows, temperature):
        self.row_counts.add(len(rows))
        return self.rows(batch)[rows]


def _completions(trainer: Trainer) -> list[Completion]:
    generator = np.random.default_rng(1)
    completions = []
    for index, (prompt, tokens) in enumerate([(5, 9), (1, 4), (12, 30)]):
        ids = generator.integers(1, VOCABULARY, prompt + tokens).astype(np.int32)
        alone = SimpleNamespace(tokens=ids, positions=np.arange(len(ids)))
        rows = trainer.rows(alone)[prompt - 1 : -1]
        sampled = ids[prompt:]
        values = rows[np.arange(tokens), sampled]
        completions.append(
            Completion(index, tuple(ids[:prompt]), tuple(sampled), values, "length", "", dict(enumerate(rows)))
        )
    return completions


def _compare(trainer: Trainer, completions: list[Completion]):
    packing = {"start_multiple": 8, "sealed_lengths": (32, 64)}
    return compare_with_trainer(trainer, {}, completions, temperature=1.0, batch_tokens=64, packing=packing)


def test_equal_values_are_counted_and_found_exact():
    trainer = Trainer()
    counts = _compare(trainer, _completions(trainer))
    assert (counts.tokens, counts.rows) == (43, 43)
    assert counts.exact
    assert counts.max_abs == 0.0
    assert 2.0 < counts.entropy_sum / counts.rows < np.log(VOCABULARY)
    assert trainer.row_counts == {ROWS_AT_ONCE}


@pytest.mark.parametrize("spoil", [lambda x: np.nextafter(x, np.float32(0)), lambda x: np.float32("nan")])
def test_one_bit_in_a_token_or_a_row_is_found(spoil):
    trainer = Trainer()
    for where in ("token", "row"):
        completions = _completions(trainer)
        values = completions[2].log_probs if where == "token" else completions[2].rows[7]
        values[11] = spoil(values[11])
        counts = _compare(trainer, completions)
        assert not counts.exact
        assert (counts.token_mismatches, counts.row_mismatches) == ((1, 0) if where == "token" else (0, 1))
        assert counts.max_abs > 0


def _tapped(completions: list[Completion], limit: int) -> TappedRows:
    """The completions' rows in one torch tensor with room to spare, in no order."""
    places = [(i, t) for i, completion in enumerate(completions) for t in range(len(completion.tokens))]
    slots = np.random.default_rng(2).permutation(limit)[: len(places)]
    rows = torch.full((limit, VOCABULARY), float("nan"))
    for slot, (index, token) in zip(slots, places, strict=True):
        rows[slot] = torch.from_numpy(completions[index].rows[token].copy())
    return TappedRows(rows, tuple(map(int, slots)), *zip(*places, strict=True), chunk_ends=0)


@pytest.mark.parametrize("bit", [0, 1], ids=["equal", "one bit in one row"])
def test_rows_that_stay_in_torch_memory_are_compared_there(bit):
    trainer = Trainer()
    completions = _completions(trainer)
    tapped = _tapped(completions, limit=64)
    words = tapped.rows.view(torch.int32)
    words[tapped.slots[20], 11] ^= bit
    bare = [dataclasses.replace(completion, rows=None) for completion in completions]
    packing = {"start_multiple": 8, "sealed_lengths": (32, 64)}
    counts = compare_with_trainer(
        trainer, {}, bare, temperature=1.0, batch_tokens=64, packing=packing, tapped=tapped, rows_at_once=16
    )
    assert (counts.tokens, counts.rows, counts.token_mismatches) == (43, 43, 0)
    assert counts.row_mismatches == bit
    assert (counts.max_abs > 0) == bool(bit)
    assert trainer.row_counts == {16}


def test_nothing_compared_is_not_exact():
    assert not _compare(Trainer(), []).exact
