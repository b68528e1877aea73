"""Keeps a uniform sample of full log-probability rows, copied where `compute_logits` makes them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge.batch_view import RowOwner


@dataclass
class RowTap:
    """A reservoir of at most `limit` rows out of all sampled tokens, each equally likely (Vitter 1985, algorithm R).

    So a caller gets `limit` rows whatever the lengths turn out to be, from first tokens (prefill) and later ones alike.
    """

    limit: int
    seed: int
    _random: random.Random = field(init=False)
    _seen: int = 0
    _rows: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def offer(self, rows_NV: torch.Tensor, owners: list[RowOwner]) -> None:
        """Takes copies of the rows that the reservoir chooses; vLLM goes on to overwrite the originals."""
        for index, owner in enumerate(owners):
            if not owner.sampled or owner.record is None:
                continue
            slot = self._seen if self._seen < self.limit else self._random.randrange(self._seen + 1)
            self._seen += 1
            if slot >= self.limit:
                continue
            kept = (owner.record, owner.token_index, rows_NV[index].clone())
            if slot == len(self._rows):
                self._rows.append(kept)
            else:
                self._rows[slot] = kept

    def take(self) -> dict[str, Any]:
        """What was kept, and an empty reservoir. Values as bytes: vLLM's serialisation has no arrays in replies.

        records, token_indices: one integer a row; rows: little-endian fp32, one row after another; width: V.
        """
        rows, self._rows, self._seen = self._rows, [], 0
        return {
            "records": [record for record, _, _ in rows],
            "token_indices": [token_index for _, token_index, _ in rows],
            "width": int(rows[0][2].shape[0]) if rows else 0,
            "rows": b"".join(row.cpu().numpy().tobytes() for _, _, row in rows),
        }
