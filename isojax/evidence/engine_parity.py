"""Compares what an engine sampled with what the trainer computes for the same tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isojax.policy import PackedBatch, Policy, completion_rows, pack
from isojax.rl.mismatch import different_bits
from isojax.rl.rollout import Completion

ROWS_AT_ONCE = 32
"""Full rows that the trainer computes in one call: a sealed number of rows, also where nothing is sealed."""


@dataclass(frozen=True)
class ParityCounts:
    """Counts of one comparison. `max_abs` is the largest difference; entropy is that of the full rows, in nats."""

    tokens: int = 0
    token_mismatches: int = 0
    rows: int = 0
    row_mismatches: int = 0
    max_abs: float = 0.0
    entropy_sum: float = 0.0

    def __add__(self, other: ParityCounts) -> ParityCounts:
        """Both comparisons together."""
        return ParityCounts(
            self.tokens + other.tokens,
            self.token_mismatches + other.token_mismatches,
            self.rows + other.rows,
            self.row_mismatches + other.row_mismatches,
            max(self.max_abs, other.max_abs),
            self.entropy_sum + other.entropy_sum,
        )

    @property
    def exact(self) -> bool:
        """Whether something was compared and nothing differed."""
        return self.tokens > 0 and not self.token_mismatches and not self.row_mismatches


def compare_with_trainer(
    policy: Policy,
    params: Mapping[str, Any],
    completions: Sequence[Completion],
    *,
    temperature: float,
    batch_tokens: int,
    packing: Mapping[str, Any],
) -> ParityCounts:
    """Sampled tokens against `policy.log_probs`, tapped full rows against `policy.log_prob_rows`.

    batch_tokens: rows of one packed batch, at most. packing: further arguments of `isojax.pack`, such as
    `isojax.kernels.packing_of`. Floats are compared as integers, so signed zeros and NaN count.
    """
    total = ParityCounts()
    for chosen in _batches(completions, batch_tokens, packing.get("start_multiple", 1)):
        batch = pack(
            [completion.prompt_tokens + completion.tokens for completion in chosen],
            [len(completion.prompt_tokens) for completion in chosen],
            **packing,
        )
        scores = np.asarray(policy.log_probs(params, batch, temperature))
        for number, completion in enumerate(chosen):
            found = scores[completion_rows(batch, number)]
            total += _tokens(np.asarray(completion.log_probs, np.float32), found)
        total += _full_rows(policy, params, batch, chosen, temperature)
    return total


def _batches(completions: Sequence[Completion], limit: int, step: int) -> list[list[Completion]]:
    batches: list[list[Completion]] = [[]]
    used = 0
    for completion in completions:
        length = -(-(len(completion.prompt_tokens) + len(completion.tokens)) // step) * step
        if batches[-1] and used + length > limit:
            batches.append([])
            used = 0
        batches[-1].append(completion)
        used += length
    return [batch for batch in batches if batch]


def _tokens(engine: np.ndarray, trainer: np.ndarray) -> ParityCounts:
    return ParityCounts(
        tokens=engine.size,
        token_mismatches=int(different_bits(engine, trainer).sum()),
        max_abs=_difference(engine, trainer),
    )


def _full_rows(
    policy: Policy,
    params: Mapping[str, Any],
    batch: PackedBatch,
    completions: Sequence[Completion],
    temperature: float,
) -> ParityCounts:
    wanted = [
        (completion_rows(batch, number)[index], row)
        for number, completion in enumerate(completions)
        for index, row in sorted((completion.rows or {}).items())
    ]
    total = ParityCounts()
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        part = wanted[start : start + ROWS_AT_ONCE]
        # Always the same number of rows, by repeating some: one compiled program, of a size that is sealed.
        rows = np.resize(np.array([row for row, _ in part]), ROWS_AT_ONCE)
        trainer = np.asarray(policy.log_prob_rows(params, batch, rows, temperature))[: len(part)]
        engine = np.stack([values for _, values in part])
        differ = different_bits(engine, trainer).any(axis=1)
        probabilities = np.exp(trainer.astype(np.float64))
        total += ParityCounts(
            rows=len(part),
            row_mismatches=int(differ.sum()),
            max_abs=_difference(engine, trainer),
            entropy_sum=float(-(probabilities * trainer).sum()),
        )
    return total


def _difference(engine: np.ndarray, trainer: np.ndarray) -> float:
    # NaN counts as an infinite difference.
    return float(np.nan_to_num(np.abs(engine - trainer), nan=np.inf).max(initial=0.0))
