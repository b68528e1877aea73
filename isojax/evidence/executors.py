"""Ways to run one policy's forward while every region's result is kept, to be compared with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

import jax

from contracts.errors import BadConfig
from isojax.evidence.capture import RegionOutput, capture_forward, capture_forward_apart
from isojax.policy.batch import PackedBatch
from isojax.policy.policy import Policy

ENTRY_POINTS = "isojax.executors"

# (exported policy folder, policy, packed parameters, packed batch) to every region's results, the head's rows last.
Executor = Callable[[Path, Policy, Mapping[str, jax.Array], PackedBatch], list[RegionOutput]]


def executor_names() -> list[str]:
    """The executors of this package and those that installed packages register under `isojax.executors`."""
    return sorted({*_OWN, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def open_executor(name: str) -> Executor:
    """The executor of a name. Raises BadConfig for an unknown one."""
    if name in _OWN:
        return _OWN[name]
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return point.load()
    raise BadConfig(
        field="executor",
        found=name,
        allowed=executor_names(),
        reason=f"Executors register under the entry point group {ENTRY_POINTS!r}.",
    )


def _trainer(folder: Path, policy: Policy, params: Mapping[str, jax.Array], batch: PackedBatch) -> list[RegionOutput]:
    """The whole forward as one XLA program, layers in a scan: what the trainer runs."""
    return capture_forward(policy, params, batch)


def _regions(folder: Path, policy: Policy, params: Mapping[str, jax.Array], batch: PackedBatch) -> list[RegionOutput]:
    """Every region as a program of its own, no neighbour to fuse with: how an engine calls them."""
    return capture_forward_apart(policy, params, batch)


_OWN: dict[str, Executor] = {"trainer": _trainer, "regions": _regions}
