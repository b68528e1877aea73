"""Compares what an engine sampled with what the trainer computes for the same tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.kernels.packing import Packing
from isojax.policy import Policy
from isojax.rl.mismatch import different_bits
from isojax.rl.packing import cut
from isojax.rl.rollout import Completion, TappedRows

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
    packing: Packing,
    tapped: TappedRows | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
) -> ParityCounts:
    """Sampled tokens against `policy.log_probs`, full rows against `policy.log_prob_rows`.

    batch_tokens: rows of one packed batch, at most. packing: as `isojax.kernels.packing_of` gives it. Floats are
    compared as integers, so signed zeros and NaN count. The full rows are those in the completions, or where given
    those of `tapped`, which are compared where they are: counts alone come back.
    rows_at_once: full rows that the trainer computes in one call.
    """
    engine_rows = _engine_rows(completions, tapped)
    total = ParityCounts()
    for micro in cut(completions, range(len(completions)), batch_tokens, packing):
        scores = np.asarray(policy.log_probs(params, micro.batch, temperature))
        for index, rows in zip(micro.completions, micro.rows, strict=True):
            total += _tokens(np.asarray(completions[index].log_probs, np.float32), scores[rows])
        wanted = [
            (int(rows[token_index]), slot)
            for index, rows in zip(micro.completions, micro.rows, strict=True)
            for token_index, slot in engine_rows.places[index]
        ]
        for start in range(0, len(wanted), rows_at_once):
            part = wanted[start : start + rows_at_once]
            # Always the same number of rows, by repeating some: one compiled program, of a size that is sealed.
            batch_rows, slots = np.resize(np.array(part, np.int32), (rows_at_once, 2)).T
            trainer = policy.log_prob_rows(params, micro.batch, batch_rows, temperature)
            compared = jax.device_get(_compare_rows(engine_rows.rows_SV, slots, trainer))
            differ_R, difference_R, entropy_R = (values[: len(part)] for values in compared)
            total += ParityCounts(
                rows=len(part),
                row_mismatches=int(differ_R.sum()),
                max_abs=float(difference_R.max()),
                entropy_sum=float(entropy_R.sum(dtype=np.float64)),
            )
    return total


@dataclass(frozen=True)
class _EngineRows:
    """The engine's full rows [S, V] on the device, and for each completion its (token index, row) pairs."""

    rows_SV: jax.Array
    places: list[list[tuple[int, int]]]


def _engine_rows(completions: Sequence[Completion], tapped: TappedRows | None) -> _EngineRows:
    places: list[list[tuple[int, int]]] = [[] for _ in completions]
    if tapped is not None:
        if tapped.rows is None:
            return _EngineRows(jnp.zeros((0, 0), jnp.float32), places)
        for index, token_index, slot in zip(tapped.completions, tapped.token_indices, tapped.slots, strict=True):
            places[index].append((token_index, slot))
        return _EngineRows(jnp.from_dlpack(tapped.rows), places)
    rows: list[np.ndarray] = []
    for index, completion in enumerate(completions):
        for token_index, row in sorted((completion.rows or {}).items()):
            places[index].append((token_index, len(rows)))
            rows.append(row)
    return _EngineRows(jnp.asarray(np.stack(rows) if rows else np.zeros((0, 0), np.float32)), places)


@jax.jit
def _compare_rows(
    engine_SV: jax.Array, slots_R: jax.Array, trainer_RV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every row: whether a bit differs, the largest difference (infinite for NaN), and the trainer's entropy."""
    engine_RV = engine_SV[slots_R]
    differ_RV = jax.lax.bitcast_convert_type(engine_RV, jnp.int32) != jax.lax.bitcast_convert_type(
        trainer_RV, jnp.int32
    )
    difference_RV = jnp.where(differ_RV, jnp.nan_to_num(jnp.abs(engine_RV - trainer_RV), nan=jnp.inf), 0.0)
    return differ_RV.any(1), difference_RV.max(1), entropy(trainer_RV)


def entropy(log_probs_NV: jax.Array) -> jax.Array:
    """Entropy of every row of log-probabilities in nats, fp32 [N]; an impossible token adds nothing."""
    probabilities_NV = jnp.exp(log_probs_NV)
    return -jnp.where(probabilities_NV > 0, probabilities_NV * log_probs_NV, 0.0).sum(1)


def _tokens(engine: np.ndarray, trainer: np.ndarray) -> ParityCounts:
    return ParityCounts(
        tokens=engine.size,
        token_mismatches=int(different_bits(engine, trainer).sum()),
        # NaN counts as an infinite difference.
        max_abs=float(np.nan_to_num(np.abs(engine - trainer), nan=np.inf).max(initial=0.0)),
    )
