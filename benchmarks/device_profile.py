"""What a compiled function spends on the device, by kernel, as JAX's profiler sees it."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(call: Callable[[], Any], most: int = 25) -> list[dict[str, Any]]:
    """The `most` kernels that took the longest in one call: name, milliseconds, launches. Empty without a device."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready(call())
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "/device:GPU" in event["args"].get("name", "")
    }
    lines = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and event["pid"] in devices and "Stream" in event["args"].get("name", "")
    }
    spent: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in lines:
            spent[event["name"]].append(event["dur"] / 1000)
    rows = [{"kernel": name, "ms": round(sum(ms), 3), "launches": len(ms)} for name, ms in spent.items()]
    return sorted(rows, key=lambda row: -row["ms"])[:most]
