"""Prints "equal" where the Triton kernel fills what `StepInputs` fills without it; run with TRITON_INTERPRET=1."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from step_samples import PAGE, REQUEST_PAGES, REQUESTS, Step

from bridge import device_step
from bridge.device_step import fill_on_card
from bridge.step_inputs import StepInputs
from contracts.errors import LaunchRefused


def main() -> None:
    """Compares steps with padding, without, of one token and of many, over what a longer one left."""
    steps = [
        Step([(0, 5), (7, 1), (2, 3)]),
        Step([(3, 1), (7, 1)], tokens=8, requests=4),
        Step([(5, 2)], tokens=40, requests=4),
        Step([(0, 1)]),
        Step([(0, 24), (1, 7)]),
    ]
    # A table wider than one turn of a program, too: of two columns here.
    for step, columns in itertools.product(steps, (device_step.COLUMNS, 2)):
        device_step.COLUMNS = columns
        inputs = StepInputs((8, 16, 64), REQUESTS, REQUEST_PAGES, PAGE, torch.device("cpu"))
        expected = inputs.prepare(step.ids, step.positions, step.batch)
        filled = tuple(torch.full_like(getattr(expected, f.name), 5) for f in dataclasses.fields(expected))
        # Of the table only the rows and columns that vLLM gives are written.
        filled[-1].zero_()
        batch = step.batch
        fill_on_card(
            step.ids, step.positions, batch.query_start_loc[1:], batch.slot_mapping, batch.block_table, filled, PAGE
        )
        for field, found in zip(dataclasses.fields(expected), filled, strict=True):
            assert torch.equal(found, getattr(expected, field.name)), (step.spans, columns, field.name, found)
    ends = torch.zeros(REQUESTS + 1, dtype=torch.int32)
    with pytest.raises(LaunchRefused, match=f"requests of a step: found {REQUESTS + 1}; allowed: at most"):
        fill_on_card(step.ids, step.positions, ends, batch.slot_mapping, batch.block_table, filled, PAGE)
    print("equal")


main()
