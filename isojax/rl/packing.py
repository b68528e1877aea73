"""Cuts a rollout into packed micro-batches and carries per-completion values to packed rows and back."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.errors import BadConfig
from isojax.kernels.packing import UNSEALED, Packing
from isojax.policy.batch import PackedBatch, completion_rows, pack
from isojax.rl.rollout import Completion

# T: tokens of a packed micro-batch.

SMALLEST_LENGTH = 64


@dataclass(frozen=True)
class MicroBatch:
    """Some completions of a rollout in one packed batch.

    completions: their indices in the rollout. rows: for each, the rows of the batch that predict its tokens, in order.
    """

    completions: tuple[int, ...]
    batch: PackedBatch
    rows: tuple[np.ndarray, ...]

    def spread(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [T]: at each row that predicts a sampled token its value; 0 elsewhere.

        values: one array a completion of the whole rollout, one number a token.
        """
        packed_T = np.zeros(len(self.batch.tokens), np.float32)
        for completion, rows in zip(self.completions, self.rows, strict=True):
            packed_T[rows] = values[completion]
        return packed_T

    def gather(self, packed_T: np.ndarray, into: MutableSequence[Any]) -> None:
        """The inverse of `spread`: put each completion's own values into `into`, at its index in the rollout."""
        for completion, rows in zip(self.completions, self.rows, strict=True):
            into[completion] = packed_T[rows]


def cut(
    completions: Sequence[Completion], indices: Sequence[int], capacity: int, packing: Packing = UNSEALED
) -> list[MicroBatch]:
    """Micro-batches of at most `capacity` tokens with the completions at `indices`, each of them whole.

    First fit in the given order. On a mesh every shard has up to `capacity` tokens, and a sequence goes to the emptiest
    of a micro-batch, so that none is cut and no device is idle for long. Batches are padded to `capacity` halved as
    often as their content allows, so that only a handful of lengths is ever compiled; for sealed kernels to the next
    sealed length, and sequences start where these ask for it (`Policy.packing`). Raises BadConfig if one sequence is
    longer than a micro-batch, or no sealed length is within `capacity`.
    """
    capacity, sealed_lengths = fitting_lengths(capacity, packing)
    shards = packing.get("shards", 1)
    # By micro-batch, and in it by shard.
    contents: list[list[list[int]]] = []
    used: list[list[int]] = []
    for index in indices:
        tokens = len(completions[index].prompt_tokens) + len(completions[index].tokens)
        require_fitting(tokens, capacity, packing, f"Completion {index} with its prompt")
        length = -(-tokens // packing["start_multiple"]) * packing["start_multiple"]
        place = next((number for number, filled in enumerate(used) if min(filled) + length <= capacity), None)
        if place is None:
            contents.append([[] for _ in range(shards)])
            used.append([0] * shards)
            place = len(used) - 1
        emptiest = used[place].index(min(used[place]))
        contents[place][emptiest].append(index)
        used[place][emptiest] += length
    return [
        _micro_batch(
            completions, content, padded_length(max(filled), capacity), packing["start_multiple"], sealed_lengths
        )
        for content, filled in zip(contents, used, strict=True)
    ]


def fitting_lengths(capacity: int, packing: Packing) -> tuple[int, tuple[int, ...]]:
    """Most tokens of a micro-batch within `capacity`, and the sealed lengths within it: the largest is the most.

    Raises BadConfig where kernels are sealed for longer batches alone.
    """
    sealed = packing["sealed_lengths"]
    if not sealed:
        return capacity, ()
    within = tuple(length for length in sealed if length <= capacity)
    if not within:
        raise BadConfig(
            field="train.micro_batch_tokens",
            found=capacity,
            allowed=f"at least {sealed[0]}",
            reason=f"The policy's trainer kernels are sealed for batches of {_listed(sealed)} tokens and no others.",
        )
    return within[-1], within


def require_fitting(tokens: int, most: int, packing: Packing, what: str) -> None:
    """Raises BadConfig, with the size that would do, where a sequence of `tokens` is longer than a micro-batch.

    most: as `fitting_lengths` gives it.
    """
    if tokens <= most:
        return
    reason = f"{what} has {tokens} tokens, and a sequence is never cut."
    sealed = packing["sealed_lengths"]
    allowed = next((f"at least {length}" for length in sealed or (tokens,) if length >= tokens), None)
    if allowed is None:
        allowed = "no size that is sealed"
        reason += f" The trainer's kernels are sealed for {_listed(sealed)} tokens; export the policy with more."
    raise BadConfig(field="train.micro_batch_tokens", found=most, allowed=allowed, reason=reason)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def padded_length(tokens: int, capacity: int) -> int:
    """`capacity` halved while it stays even, holds `tokens` and is at least SMALLEST_LENGTH."""
    length = capacity
    while length % 2 == 0 and length // 2 >= max(tokens, SMALLEST_LENGTH):
        length //= 2
    return length


def _micro_batch(
    completions: Sequence[Completion],
    content: list[list[int]],
    length: int,
    start_multiple: int,
    sealed_lengths: Sequence[int],
) -> MicroBatch:
    indices = [index for shard in content for index in shard]
    chosen = [completions[index] for index in indices]
    numbers = iter(range(len(indices)))
    batch = pack(
        [completion.prompt_tokens + completion.tokens for completion in chosen],
        [len(completion.prompt_tokens) for completion in chosen],
        length_multiple=length,
        start_multiple=start_multiple,
        sealed_lengths=sealed_lengths,
        shards=[[next(numbers) for _ in shard] for shard in content],
    )
    return MicroBatch(tuple(indices), batch, tuple(completion_rows(batch, number) for number in range(len(chosen))))
