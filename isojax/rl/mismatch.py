"""Compares what the engine reported with what the trainer computes, as bit patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contracts.errors import DifferenceFound
from isojax.rl.rollout import Completion


@dataclass(frozen=True)
class Mismatch:
    """What one step's comparison found. A token or a row mismatches if a single bit differs.

    tokens: sampled tokens compared. wrong: those that differ in at least one case, as (completion, index in it).
    full_rows: whole rows compared. max_abs: how far apart the worst pair of values is.
    first: where the first difference is and what the two values are, or None.
    """

    tokens: int = 0
    wrong: frozenset[tuple[int, int]] = frozenset()
    full_rows: int = 0
    full_row_mismatches: int = 0
    max_abs: float = 0.0
    first: str | None = None

    def joined(self, other: Mismatch) -> Mismatch:
        """Both comparisons of one rollout together: a token that two cases looked at counts once, rows add up."""
        return Mismatch(
            max(self.tokens, other.tokens),
            self.wrong | other.wrong,
            self.full_rows + other.full_rows,
            self.full_row_mismatches + other.full_row_mismatches,
            max(self.max_abs, other.max_abs),
            self.first if self.first is not None else other.first,
        )

    @property
    def mismatch_tokens(self) -> int:
        """Sampled tokens with a difference."""
        return len(self.wrong)

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


def compare_tokens(completions: Sequence[Completion], case: str, trainer: Sequence[np.ndarray | None]) -> Mismatch:
    """The engine's log-probability of every sampled token against one of the trainer's cases, named `case`.

    trainer: float32 [len(tokens)] a completion, or None for a completion that is not compared.
    """
    tokens, wrong, largest, first = 0, set(), 0.0, None
    for index, (completion, values) in enumerate(zip(completions, trainer, strict=True)):
        if values is None:
            continue
        engine = completion.log_probs
        tokens += len(engine)
        places = np.flatnonzero(different_bits(engine, values))
        if places.size:
            wrong |= {(index, int(place)) for place in places}
            largest = max(largest, float(np.max(np.abs(engine - values))))
            place = places[0]
            first = first or (
                f"completion {index} (prompt {completion.prompt_index}), token {place}: engine {_bits(engine[place])}, "
                f"{case} {_bits(values[place])}"
            )
    return Mismatch(tokens=tokens, wrong=frozenset(wrong), max_abs=largest, first=first)


def compare_row(completion: int, place: int, engine: np.ndarray, trainer: np.ndarray) -> Mismatch:
    """One full row, float32 [vocab_size] on both sides; `place` is the sampled token's index in its completion."""
    entries = np.flatnonzero(different_bits(engine, trainer))
    if not entries.size:
        return Mismatch(full_rows=1)
    entry = entries[0]
    return Mismatch(
        full_rows=1,
        full_row_mismatches=1,
        max_abs=float(np.max(np.abs(engine - trainer))),
        first=f"completion {completion}, row of token {place}, vocabulary entry {entry} ({entries.size} of "
        f"{engine.size} differ): engine {_bits(engine[entry])}, trainer_score {_bits(trainer[entry])}",
    )


def _bits(value: np.float32) -> str:
    return f"{float(value):.9g} (0x{int(np.float32(value).view(np.uint32)):08x})"
