"""A sample of the engine's full log-probability rows, copied where `compute_logits` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

# N: rows of a step, V: vocabulary.


@dataclass
class RowTap:
    """A reservoir of at most `limit` rows out of all sampled tokens, each equally likely (Vitter 1985, algorithm R).

    So a caller gets `limit` rows whatever the lengths turn out to be, from first tokens (prefill) and later ones alike.
    The rows stay on their device, and taking one does not wait for it.
    """

    limit: int
    seed: int
    _random: np.random.Generator = field(init=False)
    _seen: int = 0
    _owners: list[tuple[int, int]] = field(default_factory=list)
    _rows: torch.Tensor | None = None
    _chunk_ends: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def offer(
        self, rows_NV: torch.Tensor, records_N: np.ndarray, token_indices_N: np.ndarray, sampled_N: np.ndarray
    ) -> None:
        """Takes copies of the rows that the reservoir chooses; vLLM goes on to overwrite the originals.

        The arrays are `RowOwner`'s fields, int64, int64 and bool [N], with -1 for no record. As long as nothing is
        chosen, which is most of the time, a step costs the host a few operations, however many rows it has.
        """
        own_N = records_N >= 0
        self._chunk_ends += int((own_N & ~sampled_N).sum())
        (offered,) = np.nonzero(own_N & sampled_N)
        ranks = self._seen + np.arange(len(offered))
        self._seen += len(offered)
        slots = np.where(ranks < self.limit, ranks, self._random.integers(0, ranks + 1))
        chosen = slots < self.limit
        for index, slot in zip(offered[chosen].tolist(), slots[chosen].tolist(), strict=True):
            if self._rows is None:
                self._rows = rows_NV.new_empty(self.limit, rows_NV.shape[1])
            self._rows[slot].copy_(rows_NV[index])
            kept = (int(records_N[index]), int(token_indices_N[index]))
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
