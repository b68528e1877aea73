"""The refusal of a setting of vLLM."""

from __future__ import annotations

from contracts.errors import Refusal, UnsupportedModel


def refused(field: str, found: object, allowed: object, reason: str) -> Refusal:
    """The error to raise for a setting that was chosen otherwise than the contract needs it."""
    return UnsupportedModel(field=field, found=found, allowed=allowed, reason=reason)
