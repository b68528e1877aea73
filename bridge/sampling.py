"""Draws each token from the engine's log-probabilities by (seed, token index) alone, and refuses other requests.

vLLM keeps one stateful generator a request. On a CPU that fails: when a prompt is prefilled in chunks, vLLM (0.26 to
0.32) winds the generator back by `set_offset`, which CPU generators don't have, and the engine dies. A state would also
tie the draw to how a prompt was cut and to preemption. So the draw is a function: u = hash(seed, index), token = the
first one whose cumulative probability exceeds u (inverse transform sampling, cumulated in float64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from bridge.requests import check_sampling_params

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig

SAMPLING_RNG = "splitmix64_inverse_cdf"
"""The contract's name for this way of drawing."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) of 53 bits that depends on the seed and the token's index alone (SplitMix64, Steele 2014)."""
    word = (seed + _GOLDEN * (index + 1)) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((word ^ (word >> 31)) >> 11) * 2.0**-53


def draw(log_probs_V: np.ndarray, u: float) -> int:
    """The token that `u` in [0, 1) selects from one row of fp32 log-probabilities.

    One row at a time, in NumPy: vectorised kernels treat the tail of a buffer differently, so a row inside a batch
    could round otherwise than alone, and one seed would then give two answers. It also needs no thread barrier.
    """
    cumulative_V = np.cumsum(np.exp(log_probs_V), dtype=np.float64)
    # Scaled by the row's own sum, which is 1 up to rounding, so that u close to 1 never falls off the end.
    chosen = int(np.searchsorted(cumulative_V, cumulative_V[-1] * u, side="right"))
    return min(chosen, len(log_probs_V) - 1)


@dataclass
class _Row:
    """What the draws of one request need: its seed and vLLM's running list of its output tokens."""

    seed: int
    output_tokens: list[int]


class SeededSampling(LogitsProcessor):
    """A vLLM logits processor that leaves one token possible in every row that is sampled at temperature 1.

    It runs after vLLM has put the raw values aside, so what vLLM reports stays the policy's log-probability; vLLM's own
    sampler then has no choice left. Greedy rows ignore it, as they ignore every argmax-invariant processor.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called for every request of LLM and of the HTTP server, before it is queued. Raises RefusedRequest."""
        check_sampling_params(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Signature set by vLLM; nothing of it is needed on a CPU."""
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Greedy rows keep their argmax."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows vLLM's persistent batch: requests removed, added, then moved, in this order (vLLM's protocol)."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output_tokens in batch_update.added:
            self._rows.pop(index, None)
            if params.temperature > 0:
                # Without a seed, one of vLLM's own stream (set by its --seed): distinct for each request.
                seed = int(torch.randint(2**63 - 1, (1,))) if params.seed is None else params.seed
                self._rows[index] = _Row(seed, output_tokens)
        for first, second, direction in batch_update.moved:
            moving, replaced = self._rows.pop(first, None), self._rows.pop(second, None)
            if moving is not None:
                self._rows[second] = moving
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[first] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draws each random row's token and makes it the only possible one, in place. logits: fp32 [requests, V]."""
        values = logits.numpy()
        for index, row in self._rows.items():
            log_probs_V = values[index]
            token = draw(log_probs_V, uniform(row.seed, len(row.output_tokens)))
            log_probs_V.fill(-np.inf)
            log_probs_V[token] = 0.0
        return logits
