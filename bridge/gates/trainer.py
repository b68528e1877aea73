"""The trainer's XLA call and the engine's launch of one sealed program give equal bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
import torch

from bridge.gates.bits import check_all, require_equal
from bridge.gates.card import Card, Launch, Operands
from bridge.gates.families import Family, families
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.inputs import operands_of
from bridge.torch_ops import compiled
from pallas_kernels.region import REGIONS
from pallas_kernels.seal import SealedProgram

ENGINE_ONLY = ("paged_attention", "paged_qk_norm_rope")
"""Regions that no trainer calls."""


def trainer_and_engine_gate(card: Card) -> str:
    """XLA's custom call of a region and the engine's launch give equal bits for every call that a trainer makes."""
    found = [family for family in families(card.bundle.programs) if family.region not in ENGINE_ONLY]
    parts = check_all("trainer_and_engine", (part for family in found for part in _parts(card, family)))
    return f"{len(parts)} programs of {len({family.region for family in found})} regions; {caught(parts)}"


def _parts(card: Card, family: Family) -> Iterator[tuple[str, Callable[[], list[Hit]]]]:
    for program in family.ends:
        yield f"{family}", partial(_check, card, program, program is family.largest)


def _check(card: Card, program: SealedProgram, many_rows: bool) -> list[Hit]:
    operands = operands_of(card, program)
    expected = run_in_xla(program, operands)

    def compare(launch: Launch) -> None:
        for found, other in zip(launch(program, operands), expected, strict=True):
            require_equal(found, other, f"{program.region}: torch against XLA")

    compare(card.launch)
    # In a few rounded values of the smallest bucket a subtle fault may not show.
    faults = [fault for fault in faults_of(program, _longest(operands)) if fault.coarse or many_rows]
    return require_all_caught(card, program, faults, compare)


def run_in_xla(program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
    """The region's primitive under jit on this device: on a card the custom call of the loaded sealed bytes."""
    region = compiled(REGIONS[program.region], program.constants)
    if operands[program.operands[0]].is_cuda:
        torch.cuda.synchronize()
    arrays = [jax.dlpack.from_dlpack(operands[name]) for name in program.operands]
    results = jax.block_until_ready(region(*arrays))
    return tuple(map(torch.from_dlpack, results))


def _longest(operands: Operands) -> int:
    return int(operands["positions"].max()) + 1 if "positions" in operands else 0
