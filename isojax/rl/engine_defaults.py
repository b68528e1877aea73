"""What an engine does that is told nothing else: its own defaults, and what a run on a card prepares for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contracts.errors import BadConfig

DEFAULT_STEP_TOKENS = 512
"""Tokens of one step."""
DEFAULT_SEQUENCES = 64
"""Requests run at once."""
DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Memory for keys and values."""


def count_setting(settings: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    """A count out of `engine.settings`, or its default. Raises BadConfig, as the engine would later."""
    value = settings.get(name, default)
    if type(value) is not int or value < least:
        raise BadConfig(
            field=f"engine.settings.{name}",
            found=value,
            allowed=f"an integer, {least} or more",
            reason="Kernels are sealed for it.",
        )
    return value
