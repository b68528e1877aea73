"""A row's bits don't depend on how many rows there are, on the bucket, the tile, its place or its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from bridge.gates.bits import bits, check_all, failed
from bridge.gates.card import WRITER, Card, Launch, Operands
from bridge.gates.families import Family, families, row_operands, tokens_of
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.histories import ATTENTION
from bridge.gates.operands import make_operands
from pallas_kernels.seal import SealedProgram


def row_invariance_gate(card: Card) -> str:
    """Rows with every hazard have the same bits in every bucket, at several places, beside several neighbours."""
    found = [family for family in families(card.bundle.programs) if family.region not in ATTENTION]
    parts = check_all(
        "row_invariance", [(str(family), partial(_check, card, family, base_of(family, found))) for family in found]
    )
    buckets = sum(len(family.programs) for family in found)
    return f"{len(found)} calls at {buckets} buckets in all, each row in each; {caught(parts)}"


def base_of(family: Family, others: Sequence[Family]) -> SealedProgram:
    """The program whose rows are right: the family's largest, or the trainer's where the engine has a form of its own.

    Raises DifferenceFound for an engine's form without the trainer's.
    """
    if family.region != WRITER:
        return family.largest
    for other in others:
        if other.region == WRITER.removeprefix("paged_") and other.largest.constants == family.largest.constants:
            return other.largest
    raise failed(str(family), "no form of the trainer's", "one", "The engine must compute what the trainer computes.")


def _check(card: Card, family: Family, base: SealedProgram) -> list[Hit]:
    operands = make_operands(base, card.device)
    # Never from a launch with a fault: where there is one bucket alone, the fault would be on both sides.
    expected = card.launch(base, operands)
    slots = torch.arange(len(expected[0]), dtype=torch.int32, device=card.device)
    operands = {**operands, "slots": slots.flip(0)}
    for program in family.programs:
        compare_bucket(card.launch, program, operands, expected)
    check = partial(compare_bucket, program=family.smallest, operands=operands, expected=expected)
    return require_all_caught(card, family.smallest, faults_of(family.smallest), check)


def compare_bucket(
    launch: Launch, program: SealedProgram, operands: Operands, expected: tuple[torch.Tensor, ...]
) -> None:
    """Every row of the largest bucket goes through this one, in its order and in a shuffled one."""
    tokens, total = tokens_of(program), len(expected[0])
    rows = row_operands(program)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(tokens))
    for order in (torch.arange(total), shuffled):
        # The last batch is filled up with the first rows.
        order = torch.cat([order, order[: -total % tokens]]).to(expected[0].device)
        different = torch.zeros((), dtype=torch.int64, device=order.device)
        for part in order.split(tokens):
            chosen = {name: value[part] if name in rows else value for name, value in operands.items()}
            for result, whole in zip(launch(program, chosen), expected, strict=True):
                different += (bits(result) != bits(whole[part])).sum()
        if int(different):
            raise failed(
                f"{program.region} at {tokens} rows",
                f"{int(different)} values differ from the bucket of {total} rows",
                "0",
                "A row's bits depend on its bucket, its place or its neighbours.",
            )
