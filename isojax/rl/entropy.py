"""The entropy of the policy that sampled, exactly where full rows are, and as an estimate over all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isojax.rl.rollout import Completion


def mean_entropy(completions: Sequence[Completion]) -> float | None:
    """-sum p log p in nats, the mean over the completions' full rows; None where they have none.

    The rows are those that are compared bit for bit with the trainer's, so no other forward is needed.
    """
    entropies = [row_entropy(row) for completion in completions for row in (completion.rows or {}).values()]
    return float(np.mean(entropies)) if entropies else None


def row_entropy(log_probs_V: np.ndarray) -> float:
    """The entropy in nats of one row of log-probabilities, float32 [vocab_size]; -inf is a probability of 0."""
    values = log_probs_V[np.isfinite(log_probs_V)].astype(np.float64)
    return float(-np.sum(np.exp(values) * values))


def sampled_entropy(completions: Sequence[Completion]) -> float:
    """The mean of -log p over all sampled tokens, in nats: unbiased, since the tokens are drawn from p itself."""
    return -float(np.mean(np.concatenate([completion.log_probs for completion in completions]), dtype=np.float64))
