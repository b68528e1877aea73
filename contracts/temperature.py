"""The one check of a temperature, wherever it enters."""

from typing import Any

import numpy as np

from contracts.errors import BadConfig, Refusal

# The regions divide by a float32: a T that becomes 0, subnormal or infinite there would make every row NaN.
SMALLEST = float(np.finfo(np.float32).smallest_normal)
LARGEST = float(np.finfo(np.float32).max)


def check_temperature(value: Any, *, refusal: type[Refusal] = BadConfig) -> float:
    """The temperature as both sides use it: rounded to float32, once. Raises `refusal` for one that no row survives."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (number and SMALLEST <= value <= LARGEST):
        raise refusal(
            field="temperature",
            found=value,
            allowed=f"a finite number above 0, from {SMALLEST:.3g} to {LARGEST:.3g}",
            reason="Logits are divided by it in float32; the most likely token alone is greedy sampling.",
        )
    return float(np.float32(value))
