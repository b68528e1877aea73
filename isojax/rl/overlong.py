"""What a completion pays for coming close to the most tokens that it may have."""

from __future__ import annotations

import numpy as np


def overlong_penalties(lengths: np.ndarray, max_tokens: int, fraction: float) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), float64 of the shape of `lengths`.

    0 up to (1 - fraction) * max_tokens, -1 at max_tokens, a line between them. lengths: int, tokens of each
    completion, none above `max_tokens`. fraction: in (0, 1].
    """
    buffer = fraction * max_tokens
    return np.clip((max_tokens - buffer - lengths) / buffer, -1.0, 0.0)
