"""Which example comes when: a pure function of the seed and the position, so resuming needs one number."""

from __future__ import annotations

import numpy as np

from isojax.rl.rollout import derive_seed


def example_indices(seed: int, position: int, count: int, size: int) -> list[int]:
    """The examples at positions `position` to `position + count - 1` of an endless, shuffled pass over `size` examples.

    Every epoch is a fresh permutation of all the examples.
    """
    indices = []
    order, shuffled_epoch = np.empty(0, np.int64), -1
    for place in range(position, position + count):
        epoch, offset = divmod(place, size)
        if epoch != shuffled_epoch:
            order = np.random.default_rng(derive_seed("data order", seed, epoch)).permutation(size)
            shuffled_epoch = epoch
        indices.append(int(order[offset]))
    return indices
