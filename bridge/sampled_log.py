"""What was sampled, kept on the device step by step, and read once when all requests are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from bridge.device_sampling import StepRows

# N: rows of a step, V: vocabulary.

CAPACITY = 2**18
"""Tokens that wait on the device, 3 MiB of them."""

_FIELDS = {"records": np.int64, "token_indices": np.int64, "tokens": np.int64, "log_probs": np.float32}


class SampledLog:
    """The drawn tokens of every step and their log-probabilities.

    vLLM can report them as well. It then ranks each token in its row, and makes objects of every token's value at every
    step, for which the card waits: with 256 requests that takes a quarter of the time.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """capacity: tokens that wait on the device, at least as many as a step has rows."""
        self._capacity = capacity
        self._device: tuple[torch.Tensor, torch.Tensor] | None = None
        self._used = 0
        self._owners: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._read: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, log_probs_NV: torch.Tensor, drawn_N: torch.Tensor, rows: StepRows) -> None:
        """Keeps a step. log_probs: float32 [N, V]; drawn: int64 [N]. Waits for the device only when it is full."""
        count = len(drawn_N)
        if self._used + count > self._capacity:
            self._spill()
        if self._device is None:
            values = torch.empty(self._capacity, dtype=torch.float32, device=log_probs_NV.device)
            self._device = values, torch.empty(self._capacity, dtype=torch.int64, device=log_probs_NV.device)
        values, tokens = (kept[self._used : self._used + count] for kept in self._device)
        torch.gather(log_probs_NV, 1, drawn_N[:, None], out=values[:, None])
        tokens.copy_(drawn_N)
        self._used += count
        self._owners.append((rows.records_N, rows.token_indices_N, rows.sampled_N))

    def take(self) -> dict[str, bytes]:
        """What was sampled for requests with a record, and an empty log: arrays of one element a token, as bytes.

        records, token_indices, tokens: int64; log_probs: float32. vLLM's serialisation has no arrays in replies.
        """
        self._spill()
        owners, self._owners = self._owners, []
        read, self._read = self._read, []
        if not owners:
            return dict.fromkeys(_FIELDS, b"")
        records, indices, sampled = map(np.concatenate, zip(*owners, strict=True))
        log_probs, tokens = map(np.concatenate, zip(*read, strict=True))
        wanted = sampled & (records >= 0)
        found = {"records": records, "token_indices": indices, "tokens": tokens, "log_probs": log_probs}
        return {name: found[name][wanted].astype(dtype).tobytes() for name, dtype in _FIELDS.items()}

    def _spill(self) -> None:
        if self._device is not None and self._used:
            log_probs, tokens = (kept[: self._used].to("cpu", copy=True).numpy() for kept in self._device)
            self._read.append((log_probs, tokens))
        self._used = 0


def logged_values(taken: Mapping[str, bytes], tokens: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """float32 log-probabilities of each request's tokens, out of what `SampledLog.take` gave.

    tokens: what each request's completion came back with, in the order of the records. A step that was scheduled ahead
    may have sampled behind the last one: that is left out. Raises RuntimeError where other tokens were drawn.
    """
    found = {name: np.frombuffer(taken[name], dtype) for name, dtype in _FIELDS.items()}
    lengths = np.array([len(completion) for completion in tokens])
    starts = np.cumsum(lengths) - lengths
    within = found["token_indices"] < lengths[found["records"]]
    places = (starts[found["records"]] + found["token_indices"])[within]
    drawn = np.full(lengths.sum(), -1, np.int64)
    values = np.full(lengths.sum(), np.nan, np.float32)
    # A request that was preempted is drawn again where it had been: the same token of the same bits.
    drawn[places], values[places] = found["tokens"][within], found["log_probs"][within]
    returned = np.fromiter((token for completion in tokens for token in completion), np.int64, lengths.sum())
    if (wrong := np.flatnonzero(drawn != returned)).size:
        request = int(np.searchsorted(starts, wrong[0], side="right")) - 1
        raise RuntimeError(
            f"token {wrong[0] - starts[request]} of request {request} came back as {returned[wrong[0]]} and was drawn "
            f"as {drawn[wrong[0]]}: vLLM and the sampler do not agree on whose row is whose"
        )
    return np.split(values, starts[1:])
