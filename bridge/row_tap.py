"""A sample of the engine's full log-probability rows, copied where `compute_logits` makes them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge.batch_view import RowOwner

# V: vocabulary.


@dataclass
class RowTap:
    """A reservoir of at most `limit` rows out of all sampled tokens, each equally likely (Vitter 1985, algorithm R).

    So a caller gets `limit` rows whatever the lengths turn out to be, from first tokens (prefill) and later ones alike.
    The rows stay on their device, and taking one does not wait for it.
    """

    limit: int
    seed: int
    _random: random.Random = field(init=False)
    _seen: int = 0
    _owners: list[tuple[int, int]] = field(default_factory=list)
    _rows: torch.Tensor | None = None
    _chunk_ends: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def offer(self, rows_NV: torch.Tensor, owners: list[RowOwner]) -> None:
        """Takes copies of the rows that the reservoir chooses; vLLM goes on to overwrite the originals."""
        for index, owner in enumerate(owners):
            if owner.record is None:
                continue
            if not owner.sampled:
                self._chunk_ends += 1
                continue
            slot = self._seen if self._seen < self.limit else self._random.randrange(self._seen + 1)
            self._seen += 1
            if slot >= self.limit:
                continue
            if self._rows is None:
                self._rows = rows_NV.new_empty(self.limit, rows_NV.shape[1])
            self._rows[slot].copy_(rows_NV[index])
            kept = (owner.record, owner.token_index)
            if slot == len(self._owners):
                self._owners.append(kept)
            else:
                self._owners[slot] = kept

    def take(self) -> dict[str, Any]:
        """What was kept, and an empty reservoir. Values as bytes: vLLM's serialisation has no arrays in replies.

        records, token_indices: one integer a row; rows: little-endian fp32, one row after another; width: V.
        """
        taken = self.take_on_device()
        rows = taken.pop("rows")
        count = len(taken["records"])
        return {
            "records": taken["records"],
            "token_indices": taken["token_indices"],
            "width": 0 if rows is None else int(rows.shape[1]),
            "rows": b"" if rows is None else rows[:count].cpu().numpy().tobytes(),
        }

    def take_on_device(self) -> dict[str, Any]:
        """What was kept, and an empty reservoir, for a caller in the same process.

        records, token_indices: one integer a row; rows: fp32 [limit, V], of which those rows are set, or None without
        any; chunk_ends: how many prefill chunks ended before their prompt did.
        """
        owners, self._owners, self._seen = self._owners, [], 0
        rows, self._rows = self._rows, None
        chunk_ends, self._chunk_ends = self._chunk_ends, 0
        return {
            "records": [record for record, _ in owners],
            "token_indices": [token_index for _, token_index in owners],
            "rows": rows,
            "chunk_ends": chunk_ends,
        }
