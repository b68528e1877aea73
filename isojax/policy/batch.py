"""A packed batch: sequences of any length laid one after another on a single token axis."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from contracts import token_ids
from contracts.errors import BadConfig, EmptyBatch, PromptTooLong

# T: tokens of the packed batch.

# [T]: NumPy on the host, JAX inside of a traced function, a shape in an abstract one.
PerToken = Any


class PackedBatch(NamedTuple):
    """One packed token axis, [T] each. vLLM's flattened batch has the same layout.

    tokens: int32 ids. positions: int32, a token's index in its own sequence; a sequence is contiguous and starts at
    position 0. segment_ids: int32 index of the sequence in the order given to `pack`, -1 on padding. targets: int32,
    the next token of the same sequence, 0 where there is none. mask: bool, true where the target is a completion
    token.
    Padding rows have token 0, position 0 and segment -1; they attend to themselves only and are inert.
    """

    tokens: PerToken
    positions: PerToken
    segment_ids: PerToken
    targets: PerToken
    mask: PerToken


def pack(
    sequences: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int] | None = None,
    *,
    length_multiple: int = 64,
    start_multiple: int = 1,
    sealed_lengths: Sequence[int] = (),
    shards: int | Sequence[Sequence[int]] = 1,
    max_position: int | None = None,
    vocab_size: int | None = None,
) -> PackedBatch:
    """Pack sequences (prompt and completion together) into one batch of T tokens, a multiple of `length_multiple`.

    prompt_lengths: tokens of each sequence that belong to its prompt; its other tokens are the targets that `mask`
    selects (None: every token but the first is one). start_multiple: rows at which a sequence may start are multiples
    of it; padding fills the gaps. sealed_lengths: ascending; where given, a shard has the first of these lengths that
    holds it, whatever length_multiple says (both as `isojax.kernels.packing_of` has them for sealed kernels). shards:
    number of equal pieces of the token axis; no sequence straddles two of them, so a batch can be split over
    data-parallel devices; the longest sequences are placed first, each on the emptiest shard. Or which sequences each
    piece holds, by index, every one once. max_position and vocab_size: the policy's limits, checked where given.

    Raises `EmptyBatch` for no sequences or a sequence without tokens, `PromptTooLong` beyond max_position, `BadConfig`
    for what is no token id, one outside of the vocabulary, a prompt length that does not fit its sequence, or more rows
    than the largest sealed length.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise EmptyBatch(
            field="sequences",
            found=lengths,
            allowed="at least one sequence, each of at least one token",
            reason="There is nothing to run the policy on.",
        )
    if max_position is not None and max(lengths) > max_position:
        raise PromptTooLong(
            field=f"sequences[{int(np.argmax(lengths))}]",
            found=f"{max(lengths)} tokens",
            allowed=f"at most {max_position} tokens",
            reason="The policy's rope table ends there.",
        )
    prompts = list(prompt_lengths) if prompt_lengths is not None else [1] * len(lengths)
    if len(prompts) != len(lengths) or any(not 1 <= p <= n for p, n in zip(prompts, lengths, strict=True)):
        raise BadConfig(
            field="prompt_lengths",
            found=prompts,
            allowed=f"one in 1..length for each of the lengths {lengths}",
            reason="The first completion token is predicted from the last prompt token.",
        )
    ids = [
        np.array(token_ids(sequence, field=f"sequences[{index}]", vocab_size=vocab_size), np.int32)
        for index, sequence in enumerate(sequences)
    ]
    if length_multiple < 1:
        raise BadConfig(
            field="length_multiple",
            found=length_multiple,
            allowed="an integer above 0",
            reason="T is a multiple of it.",
        )
    placed = _place(lengths, shards) if isinstance(shards, int) else _checked_shards(shards, len(lengths))
    taken = [_round_up(length, start_multiple) for length in lengths]
    used = max(sum(taken[index] for index in shard) for shard in placed)
    shard_length = _sealed_length(used, sealed_lengths) if sealed_lengths else _round_up(used, length_multiple)
    total = shard_length * len(placed)
    tokens, positions, targets = (np.zeros(total, np.int32) for _ in range(3))
    segment_ids = np.full(total, -1, np.int32)
    mask = np.zeros(total, np.bool_)
    for shard_index, shard in enumerate(placed):
        start = shard_index * shard_length
        for index in shard:
            sequence = ids[index]
            rows = slice(start, start + len(sequence))
            tokens[rows] = sequence
            positions[rows] = np.arange(len(sequence))
            segment_ids[rows] = index
            targets[rows.start : rows.stop - 1] = sequence[1:]
            mask[rows.start + prompts[index] - 1 : rows.stop - 1] = True
            start += taken[index]
    return PackedBatch(tokens, positions, segment_ids, targets, mask)


def completion_rows(batch: PackedBatch, index: int) -> np.ndarray:
    """Rows of the token axis whose targets are the completion tokens of sequence `index`, in order; int64."""
    return np.flatnonzero((np.asarray(batch.segment_ids) == index) & np.asarray(batch.mask))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _sealed_length(used: int, lengths: Sequence[int]) -> int:
    for length in lengths:
        if length >= used:
            return length
    raise BadConfig(
        field="sequences",
        found=f"{used} rows",
        allowed=f"at most {lengths[-1]}",
        reason="The policy's trainer kernels are sealed for no longer batch; pack fewer sequences at once.",
    )


def _checked_shards(shards: Sequence[Sequence[int]], count: int) -> Sequence[Sequence[int]]:
    if sorted(index for shard in shards for index in shard) != list(range(count)):
        raise BadConfig(
            field="shards",
            found=[list(shard) for shard in shards],
            allowed=f"each index in 0..{count - 1} once",
            reason="A sequence lies in one piece of the token axis.",
        )
    return shards


def _place(lengths: Sequence[int], shards: int) -> list[list[int]]:
    """Sequence indices of each shard; a single shard keeps the given order."""
    if shards < 1:
        raise BadConfig(field="shards", found=shards, allowed="an integer above 0", reason="It cuts the token axis.")
    if shards == 1:
        return [list(range(len(lengths)))]
    placed: list[list[int]] = [[] for _ in range(shards)]
    filled = [0] * shards
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        emptiest = filled.index(min(filled))
        placed[emptiest].append(index)
        filled[emptiest] += lengths[index]
    return [sorted(shard) for shard in placed]
