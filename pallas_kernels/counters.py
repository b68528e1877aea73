"""Counts which region was compiled, and which was called by an engine, in which case."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import NamedTuple

from contracts.errors import UnknownCase

CASES = ("trainer_fwd", "trainer_score", "engine_prefill", "engine_decode")


class Counts(NamedTuple):
    """`installed` counts lowerings, `served` counts an engine's calls; keys are (region name, case or None)."""

    installed: dict[tuple[str, str | None], int]
    served: dict[tuple[str, str | None], int]


_current_case: ContextVar[str | None] = ContextVar("current_case", default=None)
_installed: Counter[tuple[str, str | None]] = Counter()
_served: Counter[tuple[str, str | None]] = Counter()
_lock = Lock()


@contextmanager
def case(name: str) -> Iterator[None]:
    """Everything that is lowered or served inside counts for this case. Raises UnknownCase for any other name."""
    _check(name)
    token = _current_case.set(name)
    try:
        yield
    finally:
        _current_case.reset(token)


def current_case() -> str | None:
    """The case of the innermost `case` block, None outside of all."""
    return _current_case.get()


def record_installed(region: str) -> None:
    """Counts one lowering of a region in the current case."""
    with _lock:
        _installed[region, current_case()] += 1


def record_served(region: str, case: str | None = None) -> None:
    """Counts one call of a region by an engine, in the given case or the current one."""
    if case is not None:
        _check(case)
    with _lock:
        _served[region, case or current_case()] += 1


def snapshot() -> Counts:
    """A copy of all counts."""
    with _lock:
        return Counts(dict(_installed), dict(_served))


def reset() -> None:
    """Sets all counts to zero."""
    with _lock:
        _installed.clear()
        _served.clear()


def _check(name: str) -> None:
    if name not in CASES:
        raise UnknownCase(
            field="case", found=name, allowed=", ".join(CASES), reason="A log-probability path must be in the contract."
        )
