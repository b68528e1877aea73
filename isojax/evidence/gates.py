"""Gates: checks that prove equal bits on this machine, found by name and run by anyone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from contracts.errors import BadConfig, IsojaxError
from isojax.evidence import cpu_gates

ENTRY_POINTS = "isojax.gates"
ARCHITECTURES = ("cpu", "sm90")


@dataclass(frozen=True)
class Gate:
    """One proof. `check` returns what it saw, in a few words, or raises DifferenceFound where the claim is false."""

    name: str
    arch: str
    claim: str
    check: Callable[[], str]


@dataclass(frozen=True)
class GateResult:
    """What one gate gave. detail: what it saw, or why it failed. seconds: wall clock."""

    name: str
    claim: str
    passed: bool
    seconds: float
    detail: str


def all_gates() -> list[Gate]:
    """The gates of this package, then those that installed packages register.

    An entry point of the group `isojax.gates` names a function that returns gates; engines register theirs so.
    """
    found = [Gate(name, "cpu", claim, check) for name, claim, check in cpu_gates.GATES]
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        found.extend(point.load()())
    return found


def select_gates(arch: str, names: Sequence[str] | None = None) -> list[Gate]:
    """The gates of an architecture, or those of the given names. Raises BadConfig for an unknown name or no gate."""
    known = [gate for gate in all_gates() if gate.arch == arch]
    if not known:
        raise BadConfig(
            field="--arch",
            found=arch,
            allowed=sorted({gate.arch for gate in all_gates()}),
            reason="It has no gates here.",
        )
    for name in names or ():
        if name not in {gate.name for gate in known}:
            raise BadConfig(
                field="--gate", found=name, allowed=[gate.name for gate in known], reason=f"{arch} has no such gate."
            )
    return [gate for gate in known if not names or gate.name in names]


def run_gates(gates: Sequence[Gate]) -> Iterator[GateResult]:
    """Run gates one by one. One that finds a difference, or is refused, fails; any other error is a bug and rises."""
    for gate in gates:
        start = time.perf_counter()
        try:
            detail, passed = gate.check(), True
        except IsojaxError as error:
            detail, passed = f"{type(error).__name__}: {error}", False
        yield GateResult(gate.name, gate.claim, passed, round(time.perf_counter() - start, 3), detail)
