"""Programs of a bundle that differ in their number of tokens alone, and which operands have a row a token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pallas_kernels.seal import SealedProgram

PER_LAYER = frozenset({"w", "bias", "q_norm", "k_norm", "k_cache", "v_cache", "block_table"})
"""Operands that do not grow with the tokens. Scalars don't either."""


@dataclass(frozen=True)
class Family:
    """One call of a region at every bucket, fewest tokens first."""

    programs: tuple[SealedProgram, ...]

    @property
    def region(self) -> str:
        """The region's name."""
        return self.programs[0].region

    @property
    def largest(self) -> SealedProgram:
        """The program of the largest bucket, which the others are compared with."""
        return self.programs[-1]

    @property
    def smallest(self) -> SealedProgram:
        """The program of the smallest bucket."""
        return self.programs[0]

    @property
    def ends(self) -> tuple[SealedProgram, ...]:
        """The programs of the smallest and the largest bucket, where they are two: those that get planted faults."""
        return tuple({id(program): program for program in (self.smallest, self.largest)}.values())

    def __str__(self) -> str:
        shapes = [f"{name}{list(self.largest.buffers[name].shape[1:])}" for name in self.largest.operands[:2]]
        buckets = ",".join(str(tokens_of(program)) for program in self.programs)
        return f"{self.region} {' '.join(shapes)} {dict(self.largest.constants)} at {buckets}"


def families(programs: Iterable[SealedProgram]) -> list[Family]:
    """The programs by region, constants and every size but the number of tokens."""
    found: dict[object, list[SealedProgram]] = {}
    for program in programs:
        rows = row_operands(program)
        shapes = tuple(
            (name, program.buffers[name].shape[1 if name in rows else 0 :], program.buffers[name].dtype)
            for name in program.operands
        )
        found.setdefault((program.region, program.constants, shapes), []).append(program)
    return [Family(tuple(sorted(group, key=tokens_of))) for group in found.values()]


def tokens_of(program: SealedProgram) -> int:
    """Rows of the program's bucket."""
    return program.buffers[program.operands[0]].shape[0]


def row_operands(program: SealedProgram) -> tuple[str, ...]:
    """Operands with one row a token."""
    return tuple(name for name in program.operands if name not in PER_LAYER and program.buffers[name].shape)
