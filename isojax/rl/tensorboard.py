"""TensorBoard as a second place for a run's metrics, beside metrics.jsonl, which is always written."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contracts.errors import BadConfig
from isojax.rl.metrics import StepMetrics

PACKAGE = "tensorboardX"


def require_tensorboard() -> None:
    """Raise BadConfig where the package that writes TensorBoard's files is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise BadConfig(
            field="metrics.tensorboard",
            found=f"true, and no package {PACKAGE}",
            allowed="false, or pip install 'isojax[tensorboard]'",
            reason="That package writes TensorBoard's event files; metrics.jsonl is written without it.",
        )


class TensorBoard:
    """Every number of every step's metrics as a scalar under its own name; text is left to metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        """folder: where the event files go. Raises BadConfig without the package."""
        require_tensorboard()
        self._folder = folder
        self._writer: Any = None

    def append(self, metrics: StepMetrics) -> None:
        """Add one step. A resumed run's first one hides what an earlier part of it wrote from that step on."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(self._folder), purge_step=metrics.step)
        for name, value in asdict(metrics).items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the event file."""
        if self._writer is not None:
            self._writer.close()
