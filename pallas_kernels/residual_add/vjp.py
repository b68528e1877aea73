"""The residual add's backward: the cotangent goes to both operands."""

from typing import Any

import jax


def keep(operands: tuple[jax.Array, ...], result: jax.Array) -> tuple[()]:
    """Nothing: both operands have the result's dtype."""
    return ()


def backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of both operands."""
    return cotangent, cotangent
