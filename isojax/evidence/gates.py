"""Gates: checks that prove equal bits on this machine, found by name and run by anyone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from contracts import ExecutionContract
from contracts.errors import BadConfig, IsojaxError
from isojax.evidence import cpu_gates
from isojax.evidence.proof import Proof, write_proof

ENTRY_POINTS = "isojax.gates"
ARCHITECTURES = ("cpu", "sm90")


@dataclass(frozen=True)
class Gate:
    """One proof. `check` returns what it saw, in a few words, or raises DifferenceFound where the claim is false."""

    name: str
    arch: str
    claim: str
    check: Callable[[], str]


def _nothing() -> None:
    """Gates that need no preparation."""


@dataclass(frozen=True)
class GateSuite:
    """The gates of one architecture that one package brings.

    prepare: to be called once before any check; it refuses a machine on which they can't run. proof: what their passing
    shows about this machine, for a policy's contract; None where they are about no policy folder.
    """

    arch: str
    gates: tuple[Gate, ...]
    prepare: Callable[[], None] = _nothing
    proof: Callable[[], Proof] | None = None


@dataclass(frozen=True)
class GateResult:
    """What one gate gave. detail: what it saw, or why it failed. seconds: wall clock."""

    name: str
    claim: str
    passed: bool
    seconds: float
    detail: str


def open_suites(folder: Path | None = None, mesh: Mapping[str, int] = {}) -> list[GateSuite]:
    """The gates of this package, then those that installed packages register; none has run or prepared anything yet.

    An entry point of the group `isojax.gates` names a function that takes a policy folder, or None for gates that make
    their own policy, and the degrees by axis of a mesh to prove, none of them for one device; it returns a GateSuite.
    """
    own = GateSuite("cpu", tuple(Gate(name, "cpu", claim, check) for name, claim, check in cpu_gates.GATES))
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)
    return [own, *(point.load()(folder, mesh) for point in points)]


def select_suites(arch: str, folder: Path | None = None, mesh: Mapping[str, int] = {}) -> list[GateSuite]:
    """The suites of an architecture. mesh: that they are to prove, too.

    Raises BadConfig where there is none, or where none is about a policy folder or a mesh that was named.
    """
    known = open_suites(folder, mesh)
    suites = [suite for suite in known if suite.arch == arch]
    if not suites:
        raise BadConfig(
            field="--arch",
            found=arch,
            allowed=sorted({suite.arch for suite in known}),
            reason="It has no gates here.",
        )
    if folder is not None and not any(suite.proof for suite in suites):
        raise BadConfig(
            field="FOLDER",
            found=str(folder),
            allowed=f"none with --arch {arch}",
            reason="These gates make policies of their own; only sealed kernels are proved for one policy.",
        )
    if mesh and not any(suite.proof for suite in suites):
        raise BadConfig(
            field="--mesh",
            found=mesh,
            allowed=f"none with --arch {arch}",
            reason="What a CPU's contract claims of meshes is proved by the tests of isojax, on virtual devices.",
        )
    return suites


def select_gates(suites: Sequence[GateSuite], names: Sequence[str] | None = None) -> list[Gate]:
    """All gates of the suites, or those of the given names. Raises BadConfig for an unknown name."""
    known = [gate for suite in suites for gate in suite.gates]
    for name in names or ():
        if name not in {gate.name for gate in known}:
            raise BadConfig(
                field="--gate",
                found=name,
                allowed=[gate.name for gate in known],
                reason=f"{suites[0].arch} has no such gate.",
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


def record_proof(folder: Path, suites: Sequence[GateSuite]) -> ExecutionContract:
    """Writes what the suites' gates, all passed, prove about this machine into the policy's contract; returns it."""
    (proof,) = (suite.proof for suite in suites if suite.proof is not None)
    return write_proof(folder, proof())
