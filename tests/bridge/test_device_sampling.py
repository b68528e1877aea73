"""Draws of a whole batch on the device: the same rule as a row alone, and who owns which row."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bridge.batch_view import NO_RECORD, RECORD
from bridge.device_sampling import RequestSlots, draw_rows, uniforms
from bridge.sampling import draw, uniform


def test_uniforms_are_those_of_single_draws():
    seeds = [0, 1, 12345, (1 << 62) + 7, (1 << 64) - 1]
    indices = [0, 1, 5, 1000, 70000]
    found = uniforms(np.array(seeds, np.uint64), np.array(indices))
    assert found.tolist() == [uniform(seed, index) for seed, index in zip(seeds, indices, strict=True)]


def test_draws_are_those_of_single_rows_and_greedy_rows_take_the_largest():
    log_probs = torch.log_softmax(torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 3, 1)
    u = torch.linspace(0, 1 - 2.0**-53, 64, dtype=torch.float64)
    greedy = torch.arange(64) % 4 == 0
    found = draw_rows(log_probs, u, greedy)
    expected = [
        int(row.argmax()) if is_greedy else draw(row.numpy(), float(number))
        for row, number, is_greedy in zip(log_probs, u, greedy, strict=True)
    ]
    assert found.tolist() == expected
    assert len(set(found.tolist())) > 20


@pytest.mark.parametrize("vocabulary", [1, 7, 511, 512, 513, 1999, 49152])
def test_draws_from_any_vocabulary_follow_its_probabilities_and_ignore_the_batch(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    log_probs = torch.log_softmax(torch.randn(5, vocabulary, generator=generator) * 2, 1)
    u = torch.rand(5, generator=generator, dtype=torch.float64)
    together = draw_rows(log_probs, u, None)
    expected = [draw(row.numpy(), float(number)) for row, number in zip(log_probs, u, strict=True)]
    assert together.tolist() == expected
    assert [int(draw_rows(row[None], number[None], None)) for row, number in zip(log_probs, u, strict=True)] == expected
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    possible = log_probs[:1].clone()
    possible[:, ::2] = -torch.inf
    if vocabulary > 1:
        assert bool((draw_rows(possible.expand(2, -1), edges, None) % 2 == 1).all()), "a token without mass was drawn"


def test_a_row_of_nan_gives_a_token_of_the_vocabulary():
    log_probs = torch.full((2, 50), float("nan"))
    found = draw_rows(log_probs, torch.tensor([0.3, 0.9], dtype=torch.float64), torch.tensor([True, False]))
    assert bool(((found >= 0) & (found < 50)).all())


def test_tritons_draws_are_the_plain_ones():
    """Its interpreter, in a process of its own since Triton reads that setting when a kernel is declared."""
    pytest.importorskip("triton")
    script = """
import torch
from bridge.device_draw import draw_on_card
from bridge.device_sampling import BLOCK, UNITS, draw_rows
for vocabulary in (1, 7, 511, 512, 513, 1999):
    generator = torch.Generator().manual_seed(vocabulary)
    log_probs = torch.log_softmax(torch.randn(6, vocabulary, generator=generator) * 2, 1)
    if vocabulary > 1:
        log_probs[4:, ::2] = -torch.inf
    u = torch.cat([torch.rand(4, generator=generator, dtype=torch.float64), torch.tensor([0.0, 1 - 2.0**-53])])
    found = draw_on_card(log_probs, u, block=BLOCK, units=UNITS)
    assert found.tolist() == draw_rows(log_probs, u, None).tolist(), (vocabulary, found)
    assert vocabulary == 1 or bool((found[4:] % 2 == 1).all())
nan = draw_on_card(torch.full((2, 50), torch.nan), torch.tensor([0.3, 0.9]).double(), block=BLOCK, units=UNITS)
assert bool(((nan >= 0) & (nan < 50)).all())
print("equal")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr


def _params(seed, temperature=1.0, record=None):
    return SimpleNamespace(seed=seed, temperature=temperature, extra_args=None if record is None else {RECORD: record})


def test_rows_know_their_request_their_place_and_their_seed():
    slots = RequestSlots(4, seed=0)
    slots.add(2, _params(11, record=5))
    slots.add(0, _params(12, temperature=0.0))
    prompts = np.array([6, 0, 3, 0], np.int32)
    batch = SimpleNamespace(
        req_ids=["decoding", "prefilling"],
        idx_mapping_np=np.array([2, 0], np.int32),
        num_computed_tokens_np=np.array([4, 0], np.int32),
        num_scheduled_tokens=np.array([1, 5], np.int32),
        prefill_len_np=np.array([3, 6], np.int32),
    )
    rows = slots.rows(batch, prompts)
    assert rows.records_N.tolist() == [5, NO_RECORD]
    assert rows.token_indices_N.tolist() == [2, -1]
    assert rows.sampled_N.tolist() == [True, False]
    assert rows.greedy_N.tolist() == [False, True]
    assert rows.uniforms_N[0] == uniform(11, 2)


def test_a_preempted_request_draws_the_same_token_again():
    prompts = np.array([3, 3], np.int32)
    slots = RequestSlots(2, seed=0)
    slots.add(0, _params(11))
    before = SimpleNamespace(
        req_ids=["a"],
        idx_mapping_np=np.array([0]),
        num_computed_tokens_np=np.array([4]),
        num_scheduled_tokens=np.array([1]),
        prefill_len_np=np.array([3]),
    )
    # Resumed in another slot: prompt and tokens so far are prefilled at once.
    slots.add(1, _params(11))
    after = SimpleNamespace(
        req_ids=["a"],
        idx_mapping_np=np.array([1]),
        num_computed_tokens_np=np.array([0]),
        num_scheduled_tokens=np.array([5]),
        prefill_len_np=np.array([5]),
    )
    first, again = slots.rows(before, prompts), slots.rows(after, prompts)
    for one, other in ((first.token_indices_N, again.token_indices_N), (first.sampled_N, again.sampled_N)):
        assert one.tolist() == other.tolist()
    assert first.uniforms_N.tolist() == again.uniforms_N.tolist()


def test_requests_without_a_seed_get_different_ones():
    slots = RequestSlots(8, seed=3)
    for slot in range(8):
        slots.add(slot, _params(None))
    batch = SimpleNamespace(
        req_ids=[str(slot) for slot in range(8)],
        idx_mapping_np=np.arange(8),
        num_computed_tokens_np=np.zeros(8, np.int32),
        num_scheduled_tokens=np.ones(8, np.int32),
        prefill_len_np=np.ones(8, np.int32),
    )
    assert len(set(slots.rows(batch, np.ones(8, np.int32)).uniforms_N.tolist())) == 8
