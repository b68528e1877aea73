"""High-water marks of memory: of this process on the host, and of JAX on its device."""

from __future__ import annotations

import resource
import sys
from typing import NamedTuple

import jax

# Linux counts in KiB, macOS in bytes.
_UNIT = 1 if sys.platform == "darwin" else 1024


class MemoryMarks(NamedTuple):
    """Most bytes held at once since the process started.

    process: resident on the host; an engine in this process is part of it, one in a process of its own is not.
    device: by JAX on its first device, or None where that keeps no count, as a CPU does. An engine's memory on the same
      card is not part of it.
    """

    process: int
    device: int | None


def memory_marks() -> MemoryMarks:
    """The marks as they stand now; asks the device nothing that it would have to wait for."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return MemoryMarks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT, statistics.get("peak_bytes_in_use"))
