"""Packing: contiguous sequences from position 0, inert padding, targets one ahead, clear refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import BadConfig, EmptyBatch, PromptTooLong
from isojax.policy import completion_rows, pack


@given(
    st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=40), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 64),
    st.data(),
)
def test_every_sequence_lies_whole_in_one_shard(sequences, shards, multiple, data) -> None:
    prompts = [data.draw(st.integers(1, len(sequence))) for sequence in sequences]
    batch = pack(sequences, prompts, length_multiple=multiple, shards=shards)
    assert len(batch.tokens) % (multiple * shards) == 0
    shard = len(batch.tokens) // shards
    for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        rows = np.flatnonzero(batch.segment_ids == index)
        np.testing.assert_array_equal(rows, np.arange(rows[0], rows[0] + len(sequence)))
        assert rows[0] // shard == rows[-1] // shard
        np.testing.assert_array_equal(batch.tokens[rows], sequence)
        np.testing.assert_array_equal(batch.positions[rows], np.arange(len(sequence)))
        completion = completion_rows(batch, index)
        np.testing.assert_array_equal(batch.targets[completion], sequence[prompt:])
        np.testing.assert_array_equal(completion, rows[prompt - 1 : -1])
    padding = batch.segment_ids == -1
    assert not batch.mask[padding].any()
    assert not batch.positions[padding].any()


def test_one_shard_keeps_the_given_order() -> None:
    batch = pack([[1, 2, 3], [4], [5, 6]], length_multiple=8)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert batch.segment_ids.tolist() == [0, 0, 0, 1, 2, 2, -1, -1]
    assert batch.targets.tolist() == [2, 3, 0, 0, 6, 0, 0, 0]
    assert batch.mask.tolist() == [True, True, False, False, True, False, False, False]


def test_an_empty_batch_and_an_empty_sequence_are_refused() -> None:
    with pytest.raises(EmptyBatch):
        pack([])
    with pytest.raises(EmptyBatch):
        pack([[1], []])


def test_limits_of_the_policy_are_refused_by_name() -> None:
    with pytest.raises(PromptTooLong, match=r"sequences\[1\]: found 5 tokens; allowed: at most 4"):
        pack([[1], [1] * 5], max_position=4)
    with pytest.raises(BadConfig, match="token 97; allowed: a list of token ids from 0 to 96"):
        pack([[97]], vocab_size=97)
    for prompts in ([0], [3], [1, 1]):
        with pytest.raises(BadConfig, match="prompt_lengths"):
            pack([[1, 2]], prompts)
    with pytest.raises(BadConfig, match="shards"):
        pack([[1]], shards=0)
    with pytest.raises(BadConfig, match="length_multiple"):
        pack([[1]], length_multiple=0)
    for tokens in ([1.9, 2.2], "12", [2**40], [-1]):
        with pytest.raises(BadConfig, match=r"sequences\[0\]"):
            pack([tokens])
