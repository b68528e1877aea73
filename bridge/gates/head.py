"""The trainer's fused log-probabilities of sampled tokens are the engine's full rows' values, at any temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bridge.gates.bits import check_all, failed, require_equal
from bridge.gates.card import Card, Launch, Operands
from bridge.gates.families import Family, families, tokens_of
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.operands import make_operands
from pallas_kernels.seal import SealedProgram

TEMPERATURES = (1.0, 0.6)


def fused_head_gate(card: Card) -> str:
    """Fused log-probabilities equal the full rows' values at every bucket of rows, with the temperature as operand."""
    found = families(card.bundle.programs)
    fused = [family for family in found if family.region == "token_log_probs"]
    rows = [family for family in found if family.region == "log_prob_rows"]
    parts = check_all("fused_head", (part for family in fused for part in _parts(card, family, rows)))
    return f"{len(parts)} pairs of buckets and temperatures; {caught(parts)}"


def _parts(card: Card, family: Family, others: list[Family]) -> Iterator[tuple[str, Callable[[], list[Hit]]]]:
    weight = family.largest.buffers["w"].shape
    same = [
        other
        for other in others
        if other.largest.buffers["w"].shape == weight and other.largest.constants == family.largest.constants
    ]
    if not same:
        raise failed("fused head", f"no full rows for {family}", "some", "The engine must have what the trainer has.")
    for temperature in TEMPERATURES:
        for program in family.programs:
            operands = make_operands(program, card.device, seed=3, temperature=temperature)
            for rows in (rows for other in same for rows in other.programs):
                label = f"{tokens_of(program)} targets, {tokens_of(rows)} rows, temperature {temperature}"
                faulty = program in family.ends and rows is same[0].smallest
                yield label, partial(_check, card, program, rows, operands, faulty)


def _check(card: Card, fused: SealedProgram, rows: SealedProgram, operands: Operands, faulty: bool) -> list[Hit]:
    expected = gathered(card.launch, rows, operands)

    def compare(launch: Launch) -> None:
        (found,) = launch(fused, operands)
        require_equal(found, expected, f"{tokens_of(fused)} targets against {tokens_of(rows)} rows")

    compare(card.launch)
    return require_all_caught(card, fused, faults_of(fused) if faulty else (), compare)


def gathered(launch: Launch, rows: SealedProgram, operands: Operands) -> torch.Tensor:
    """The targets' values of the full rows, computed a bucket at a time."""
    count, total = tokens_of(rows), len(operands["x"])
    order = torch.arange(total, device=operands["x"].device)
    order = torch.cat([order, order[: -total % count]])
    found = []
    for part in order.split(count):
        (table,) = launch(rows, {**operands, "x": operands["x"][part]})
        found.append(table.gather(1, operands["targets"][part].long()[:, None])[:, 0])
    return torch.cat(found)[:total]
