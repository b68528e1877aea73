"""Draws a step's tokens on the device by (seed, token index) alone: `bridge.sampling`'s rule for a whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bridge.batch_view import NO_RECORD, RECORD

# N: rows of a step, one a request; V: vocabulary; B: blocks of it; C: tokens of a block; S: vLLM's slots for requests.

UNITS = 2.0**52
BLOCK = 512

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def uniforms(seeds_N: np.ndarray, indices_N: np.ndarray) -> np.ndarray:
    """`bridge.sampling.uniform` of many rows: float64 in [0, 1) from uint64 seeds and token indices (SplitMix64)."""
    with np.errstate(over="ignore"):
        word = seeds_N + _GOLDEN * (indices_N.astype(np.uint64) + np.uint64(1))
        for shift, factor in _MIXERS:
            word = (word ^ (word >> shift)) * factor
        word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_rows(log_probs_NV: torch.Tensor, u_N: torch.Tensor, greedy_N: torch.Tensor | None) -> torch.Tensor:
    """The token of each row, int64 [N]: its argmax where greedy, else the one that `u` in [0, 1) selects.

    greedy_N: None where no row is. Inverse transform sampling over probabilities counted in units of 2^-52: float64
    adds whole numbers up to 2^53 exactly in any order, so a row's token does not depend on how the device adds, and
    neither on its neighbours. A row that holds NaN gives some token of the vocabulary; its log-probability is NaN, by
    which the caller knows it.
    """
    if log_probs_NV.is_cuda:
        # Imported here: Triton needs a card.
        from bridge.device_draw import draw_on_card

        drawn_N = draw_on_card(log_probs_NV, u_N, block=BLOCK, units=UNITS)
    else:
        drawn_N = _drawn(log_probs_NV, u_N)
    return drawn_N if greedy_N is None else torch.where(greedy_N, log_probs_NV.argmax(1), drawn_N)


def _drawn(log_probs_NV: torch.Tensor, u_N: torch.Tensor) -> torch.Tensor:
    """The rule in plain torch, for devices without Triton."""
    vocabulary = log_probs_NV.shape[1]
    # Counts of units, whole numbers: dividing by a power of two is exact, also in float32.
    mass_NV = log_probs_NV.exp().div_(1 / UNITS, rounding_mode="floor")
    # Blocks first: a scan over the whole vocabulary would keep one multiprocessor a row busy and the others waiting.
    whole = vocabulary // BLOCK * BLOCK
    blocks_NB = mass_NV[:, :whole].unflatten(1, (-1, BLOCK)).sum(2, dtype=torch.float64)
    tail_N1 = mass_NV[:, whole:].sum(1, keepdim=True, dtype=torch.float64)
    ends_NB = torch.cat([blocks_NB, tail_N1], 1).cumsum(1)
    # Scaled by the row's own sum, which is 1 up to rounding, so that u close to 1 never falls off the end.
    wanted_N1 = torch.minimum((ends_NB[:, -1:] * u_N[:, None]).floor_(), ends_NB[:, -1:] - 1)
    block_N1 = torch.searchsorted(ends_NB, wanted_N1, right=True).clamp_(max=ends_NB.shape[1] - 1)
    before_N1 = torch.where(block_N1 > 0, ends_NB.gather(1, (block_N1 - 1).clamp_(min=0)), 0.0)
    columns_NC = block_N1 * BLOCK + torch.arange(BLOCK, device=log_probs_NV.device)
    inside_NC = mass_NV.gather(1, columns_NC.clamp(max=vocabulary - 1)).masked_fill_(columns_NC >= vocabulary, 0.0)
    inside_NC = inside_NC.to(torch.float64).cumsum(1)
    place_N1 = torch.searchsorted(inside_NC, wanted_N1 - before_N1, right=True)
    return (block_N1 * BLOCK + place_N1)[:, 0].clamp_(max=vocabulary - 1)


@dataclass(frozen=True)
class StepRows:
    """Who the rows of a step belong to, all known on the host: one row a request, in the batch's order.

    Arrays, since a step has as many rows as requests and the card waits for the host where the host is slower.
    records_N (int64), token_indices_N (int), sampled_N (bool): as in `RowOwner`, with -1 for no record. seeds_N
    (uint64), greedy_N (bool): what each row's token is drawn with.
    """

    records_N: np.ndarray
    token_indices_N: np.ndarray
    sampled_N: np.ndarray
    seeds_N: np.ndarray
    greedy_N: np.ndarray

    @property
    def uniforms_N(self) -> np.ndarray:
        """The number that each row's token is drawn with, float64 [N]."""
        return uniforms(self.seeds_N, np.maximum(self.token_indices_N, 0))


class RequestSlots:
    """What a draw needs of each running request, by vLLM's slot: seed, greedy or not, and the engine's own number."""

    def __init__(self, slots: int, seed: int) -> None:
        """slots: requests that run at once. seed: of the stream from which requests without a seed get theirs."""
        self._seeds_S = np.zeros(slots, np.uint64)
        self._greedy_S = np.zeros(slots, np.bool_)
        self._records_S = np.full(slots, NO_RECORD, np.int64)
        self._stream = np.random.default_rng(seed)

    def add(self, slot: int, params: Any) -> None:
        """A request with these vLLM sampling parameters takes a slot; once more after it was preempted."""
        seed = int(self._stream.integers(1 << 62)) if params.seed is None else params.seed
        self._seeds_S[slot] = seed & ((1 << 64) - 1)
        self._greedy_S[slot] = params.temperature == 0.0
        self._records_S[slot] = (params.extra_args or {}).get(RECORD, NO_RECORD)

    def rows(self, batch: Any, prompt_lengths_S: np.ndarray) -> StepRows:
        """The rows of vLLM's `InputBatch`. prompt_lengths: int [S], in tokens."""
        slots_N = batch.idx_mapping_np
        # Of the last token of each request in this step; the row predicts the one after it.
        ends_N = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        return StepRows(
            records_N=self._records_S[slots_N],
            token_indices_N=ends_N - prompt_lengths_S[slots_N],
            # A chunk that ends before the request's last known token: vLLM throws the drawn one away.
            sampled_N=ends_N >= batch.prefill_len_np,
            seeds_N=self._seeds_S[slots_N],
            greedy_N=self._greedy_S[slots_N],
        )


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, copied without waiting for it."""
    tensor = torch.from_numpy(values)
    # From pageable memory the copy would wait for the stream.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
