"""Batches for sealed kernels: sequences start where the kernels want them, in a length that is sealed."""

import numpy as np
import pytest

from contracts.errors import BadConfig
from isojax import completion_rows, pack
from isojax.kernels import KernelShapes, packing_of

SHAPES = KernelShapes(trainer_tokens=(128, 256), max_context=64)
SEQUENCES = [list(range(1, 14)), [3], list(range(5, 21)), list(range(2, 11))]


def test_sequences_start_at_multiples_of_eight_in_the_smallest_sealed_length():
    batch = pack(SEQUENCES, [3, 1, 2, 9], **packing_of(SHAPES))
    assert len(batch.tokens) == 128
    starts = [int(np.flatnonzero(batch.segment_ids == number)[0]) for number in range(4)]
    assert starts == [0, 16, 24, 40]
    for number, (start, sequence) in enumerate(zip(starts, SEQUENCES, strict=True)):
        rows = slice(start, start + len(sequence))
        assert batch.tokens[rows].tolist() == sequence
        assert batch.positions[rows].tolist() == list(range(len(sequence)))
        assert set(batch.segment_ids[rows]) == {number}
    padding = batch.segment_ids < 0
    assert padding.sum() == 128 - sum(map(len, SEQUENCES))
    assert not batch.tokens[padding].any()
    assert not batch.positions[padding].any()
    assert not batch.mask[padding].any()
    assert completion_rows(batch, 2).tolist() == list(range(25, 39))


def test_a_batch_that_fills_no_sealed_length_is_refused():
    assert len(pack([[1] * 129], **packing_of(SHAPES)).tokens) == 256
    with pytest.raises(BadConfig, match="found 264 rows; allowed: at most 256"):
        pack([[1] * 129, [1] * 121], **packing_of(SHAPES))


def test_without_sealed_kernels_nothing_is_padded_between_sequences():
    batch = pack(SEQUENCES)
    assert len(batch.tokens) == 64
    assert batch.segment_ids.tolist()[: 13 + 1] == [0] * 13 + [1]
