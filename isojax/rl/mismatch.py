"""Compares what the engine reported with what the trainer computes, as bit patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import DifferenceFound
from isojax.rl.rollout import Completion


@dataclass(frozen=True)
class Mismatch:
    """Counts of one step. A token or a row mismatches if a single bit differs; `max_abs` only says how far apart.

    tokens: sampled tokens compared, each against every trainer case given. full_rows: whole rows compared.
    first: where the first difference is and what the two values are, or None.
    """

    tokens: int = 0
    mismatch_tokens: int = 0
    max_abs: float = 0.0
    full_rows: int = 0
    full_row_mismatches: int = 0
    first: str | None = None

    def __add__(self, other: Mismatch) -> Mismatch:
        """Counts add up, the larger distance and the earlier difference stay."""
        return Mismatch(
            self.tokens + other.tokens,
            self.mismatch_tokens + other.mismatch_tokens,
            max(self.max_abs, other.max_abs),
            self.full_rows + other.full_rows,
            self.full_row_mismatches + other.full_row_mismatches,
            self.first if self.first is not None else other.first,
        )

    @property
    def exact(self) -> bool:
        """Whether every bit that was compared agreed."""
        return self.mismatch_tokens == 0 and self.full_row_mismatches == 0

    def require_exact(self, step: int) -> None:
        """Raise DifferenceFound if any bit differed."""
        if not self.exact:
            raise DifferenceFound(
                field=f"step {step}, log-probabilities",
                found=f"{self.mismatch_tokens} of {self.tokens} sampled tokens and {self.full_row_mismatches} of "
                f"{self.full_rows} full rows differ, by at most {self.max_abs:.3e}",
                allowed="0",
                reason=f"First difference: {self.first}. `isojax bisect` finds the region where the two sides part; "
                "check.on_mismatch = 'record' writes differences down and goes on.",
            )


def different_bits(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where two float32 arrays of one shape differ in any bit: +0 and -0 differ, equal NaNs do not.

    Raises ValueError if a dtype is not float32 or the shapes differ.
    """
    if left.dtype != np.float32 or right.dtype != np.float32 or left.shape != right.shape:
        raise ValueError(f"needs float32 of one shape, not {left.dtype}{left.shape} and {right.dtype}{right.shape}")
    return np.ascontiguousarray(left).view(np.int32) != np.ascontiguousarray(right).view(np.int32)


def compare_tokens(completions: Sequence[Completion], trainer: dict[str, Sequence[np.ndarray]]) -> Mismatch:
    """The engine's log-probability of every sampled token against each of the trainer's cases.

    trainer: case name to one float32 [len(tokens)] array a completion. A token counts once, however many cases differ.
    """
    total = Mismatch()
    for index, completion in enumerate(completions):
        engine = completion.log_probs
        wrong = np.zeros(len(completion.tokens), bool)
        largest, first = 0.0, None
        for case, values in trainer.items():
            differs = different_bits(engine, values[index])
            wrong |= differs
            if differs.any():
                largest = max(largest, float(np.max(np.abs(engine - values[index]))))
                place = int(np.flatnonzero(differs)[0])
                first = first or (
                    f"completion {index} (prompt {completion.prompt_index}), token {place}: engine "
                    f"{_bits(engine[place])}, {case} {_bits(values[index][place])}"
                )
        total += Mismatch(len(wrong), int(wrong.sum()), largest, 0, 0, first)
    return total


def compare_rows(completion: int, engine: dict[int, np.ndarray], trainer: dict[int, np.ndarray]) -> Mismatch:
    """Full rows of one completion, by index of the sampled token; both sides float32 [vocab_size] a row."""
    total = Mismatch()
    for place, engine_row in sorted(engine.items()):
        differs = different_bits(engine_row, trainer[place])
        largest, first = 0.0, None
        if differs.any():
            largest = float(np.max(np.abs(engine_row - trainer[place])))
            entry = int(np.flatnonzero(differs)[0])
            first = (
                f"completion {completion}, row of token {place}, vocabulary entry {entry} "
                f"({int(differs.sum())} of {differs.size} differ): engine {_bits(engine_row[entry])}, trainer_score "
                f"{_bits(trainer[place][entry])}"
            )
        total += Mismatch(0, 0, largest, 1, int(differs.any()), first)
    return total


def _bits(value: np.float32) -> str:
    return f"{float(value):.9g} (0x{int(np.float32(value).view(np.uint32)):08x})"
