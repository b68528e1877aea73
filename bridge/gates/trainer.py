"""The trainer's XLA call and the engine's launch of one sealed program give equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import torch

import pallas_kernels
from bridge.gates.bits import check_all, failed, require_equal
from bridge.gates.card import WRITER, Card, Launch, Operands
from bridge.gates.families import Family, families, tokens_of
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.histories import PAGED
from bridge.gates.inputs import operands_of
from bridge.torch_ops import compiled
from pallas_kernels.region import REGIONS
from pallas_kernels.seal import SealedProgram

ENGINE_ONLY = (*PAGED, WRITER)
"""Regions that no trainer calls."""
DIFFERENTIATED: Mapping[str, Callable[..., jax.Array]] = {"gated_matmul": pallas_kernels.gated_matmul}
"""Regions that are other regions under gradients, and the functions that are differentiated."""

Results = tuple[torch.Tensor, ...]


def trainer_and_engine_gate(card: Card) -> str:
    """XLA's calls of a region, under gradients too, and the engine's launch give equal bits for all a trainer calls."""
    found = [family for family in families(card.bundle.programs) if family.region not in ENGINE_ONLY]
    parts = check_all("trainer_and_engine", (part for family in found for part in _parts(card, family)))
    return f"{len(parts)} calls of {len({family.region for family in found})} regions; {caught(parts)}"


def _parts(card: Card, family: Family) -> Iterator[tuple[str, Callable[[], list[Hit]]]]:
    for program in family.ends:
        yield f"{family}", partial(_check, card, program, run_in_xla, program is family.largest)
    if family.region not in DIFFERENTIATED:
        return
    # Only here are the other regions sealed.
    trained = [program for program in family.programs if tokens_of(program) in card.bundle.shapes.trainer_tokens]
    if not trained:
        raise failed(str(family), "no token count of a trainer's", "one", "Under gradients this region is others.")
    for program in trained:
        yield f"{family} under gradients", partial(_check, card, program, run_differentiated, True)


def _check(
    card: Card, program: SealedProgram, in_xla: Callable[[SealedProgram, Operands], Results], many_rows: bool
) -> list[Hit]:
    operands = operands_of(card, program)
    expected = in_xla(program, operands)

    def compare(launch: Launch) -> None:
        for found, other in zip(launch(program, operands), expected, strict=True):
            require_equal(found, other, f"{program.region}: torch against XLA")

    compare(card.launch)
    # In a few rounded values of the smallest bucket a subtle fault may not show.
    faults = [fault for fault in faults_of(program, _longest(operands)) if fault.coarse or many_rows]
    return require_all_caught(card, program, faults, compare)


def run_in_xla(program: SealedProgram, operands: Operands) -> Results:
    """The region's primitive under jit on this device: on a card the custom call of the loaded sealed bytes."""
    return _run(compiled(REGIONS[program.region], program.constants), program, operands)


def run_differentiated(program: SealedProgram, operands: Operands) -> Results:
    """The results that the region has under gradients: on a card the calls of the loaded bytes of other regions."""
    function = partial(DIFFERENTIATED[program.region], **dict(program.constants))
    return _run(jax.jit(lambda *arrays: (jax.vjp(function, *arrays)[0],)), program, operands)


def _run(function: Callable[..., Any], program: SealedProgram, operands: Operands) -> Results:
    if operands[program.operands[0]].is_cuda:
        torch.cuda.synchronize()
    arrays = [jax.dlpack.from_dlpack(operands[name]) for name in program.operands]
    return tuple(map(torch.from_dlpack, jax.block_until_ready(function(*arrays))))


def _longest(operands: Operands) -> int:
    return int(operands["positions"].max()) + 1 if "positions" in operands else 0
