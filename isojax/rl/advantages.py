"""From rewards to advantages, within the group of one prompt."""

from __future__ import annotations

import numpy as np

from contracts.errors import EmptyBatch

# Equal rewards such as 0.1 leave a deviation of about 1e-17 from the mean; this keeps their advantages at about zero.
EPSILON = 1e-6


def group_advantages(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Each completion's advantage over its own group: (r - mean(group)) / (std(group) + 1e-6).

    Outcome supervision of GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2. `std` is the population's. The paper
    has no epsilon: it is ours, so that a group of equal rewards has advantage 0 instead of 0/0.

    rewards: [prompts * group_size], grouped by prompt. Returns float32 of the same shape, computed in float64.
    Raises EmptyBatch without rewards; ValueError if they do not fill whole groups.
    """
    groups = _grouped(rewards, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    normalised = centred / (groups.std(axis=1, keepdims=True) + EPSILON)
    return normalised.reshape(-1).astype(np.float32)


def leave_one_out_advantages(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Each completion's reward less the mean reward of the others in its group: RLOO (arXiv 2402.14740).

    rewards: [prompts * group_size], grouped by prompt. Returns float32 of the same shape, computed in float64.
    Raises as `group_advantages`, and ValueError for groups of one.
    """
    groups = _grouped(rewards, group_size)
    if group_size < 2:
        raise ValueError("a group of one leaves nobody for the baseline")
    others = (groups.sum(axis=1, keepdims=True) - groups) / (group_size - 1)
    return (groups - others).reshape(-1).astype(np.float32)


def _grouped(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """float64 [prompts, group_size]."""
    if rewards.size == 0:
        raise EmptyBatch(field="rewards", found=0, allowed="1 or more", reason="A step needs completions.")
    if rewards.size % group_size:
        raise ValueError(f"{rewards.size} rewards do not fill groups of {group_size}")
    return rewards.astype(np.float64).reshape(-1, group_size)
