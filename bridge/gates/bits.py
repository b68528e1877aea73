"""Comparing torch tensors as bit patterns, and a gate's parts one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from tqdm import tqdm

from bridge.arrays import integer_view
from contracts.errors import DifferenceFound

Result = TypeVar("Result")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the tensor's values, whatever its strides."""
    return integer_view(tensor.contiguous())


def require_equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises DifferenceFound with the count, the place and the values of what differs."""
    different = bits(found) != bits(expected)
    if not bool(different.any()):
        return
    place = tuple(different.nonzero()[0].tolist())
    raise failed(
        what,
        f"{int(different.sum())} of {found.numel()} values differ, at {place} first: {float(found[place])!r}",
        repr(float(expected[place])),
        "Equal operands of one schedule must give equal bits.",
    )


def failed(field: str, found: object, allowed: object, reason: str) -> DifferenceFound:
    """A false claim."""
    return DifferenceFound(field=field, found=found, allowed=allowed, reason=reason)


def require_caught(what: str, check: Callable[[], object]) -> None:
    """Raises DifferenceFound where the check does not fail, although a fault was planted."""
    try:
        check()
    except DifferenceFound:
        return
    raise failed(what, "no difference", "a difference", "The planted fault was not caught: this check proves nothing.")


def check_all(name: str, parts: Iterable[tuple[str, Callable[[], Result]]]) -> list[Result]:
    """Runs every part, also after one that fails or breaks; returns what they return.

    Raises DifferenceFound that lists all failures, so that one run on a card tells everything.
    """
    failures: list[str] = []
    results: list[Result] = []
    for label, part in tqdm(list(parts), desc=name, leave=False):
        try:
            results.append(part())
        except Exception as error:
            kind = "" if isinstance(error, DifferenceFound) else f"{type(error).__name__}: "
            failures.append(f"{label}: {kind}{error}")
    count = len(results) + len(failures)
    if failures:
        raise failed(name, f"{len(failures)} of {count} parts fail: " + " | ".join(failures), "none", "See each part.")
    if not count:
        raise failed(name, "nothing to check", "at least one kernel", "An empty check proves nothing.")
    return results
