"""One call has one set of bits: launched again and again, and after other work took the memory around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bridge.gates.bits import check_all, require_caught, require_equal
from bridge.gates.card import Card, Launch, Operands
from bridge.gates.families import families
from bridge.gates.inputs import operands_of
from pallas_kernels.seal import SealedProgram

TIMES = 20


def repeatability_gate(card: Card) -> str:
    """Twenty launches of every program give one set of bits, and the results survive other work on the stream."""
    check_all("repeatability", _parts(card))
    return f"{len(card.bundle.programs)} programs launched {TIMES} times; every planted fault caught"


def _parts(card: Card) -> Iterator[tuple[str, Callable[[], object]]]:
    for family in families(card.bundle.programs):
        for program in family.programs:
            yield f"{family}", partial(_check, card, program)
        yield f"{family} with the planted fault", partial(_check_fault, card, family.smallest)


def _check(card: Card, program: SealedProgram) -> None:
    compare_launches(card.launch, program, operands_of(card, program))


def _check_fault(card: Card, program: SealedProgram) -> None:
    check = partial(compare_launches, _remembering(card.launch), program, operands_of(card, program))
    require_caught("a result that holds what an earlier launch left", check)


def compare_launches(launch: Launch, program: SealedProgram, operands: Operands) -> None:
    """Raises DifferenceFound where a launch gives other bits than the first one, or the first one's results change."""
    first = launch(program, operands)
    kept = [result.clone() for result in first]
    for number in range(1, TIMES):
        _disturb(first[0])
        for result, expected in zip(launch(program, operands), kept, strict=True):
            require_equal(result, expected, f"{program.region}, launch {number + 1}")
    for result, expected in zip(first, kept, strict=True):
        require_equal(result, expected, f"{program.region}, the first launch's result after all others")


def _disturb(like: torch.Tensor) -> None:
    """Other work on the stream, and NaN in memory that the next launch may get for its scratch."""
    for _ in range(3):
        torch.full_like(like, float("nan"), dtype=torch.float32)
    noise = torch.ones(256, 256, device=like.device)
    noise @ noise


def _remembering(launch: Launch) -> Launch:
    """The fault: a kernel whose last row is the one that the launch before it left in its scratch."""
    left: list[torch.Tensor] = []

    def run(program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
        results = tuple(result.clone() for result in launch(program, operands))
        if left:
            results[0][-1:] = left.pop()
        left.append(torch.full_like(results[0][-1:], 0.5))
        return results

    return run
