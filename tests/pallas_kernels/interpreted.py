"""Runs a program in Pallas's GPU interpreter, which executes the kernels' own source and watches for data races.

In jax 0.11.2 it executes wgmma at once and does not watch what wgmma reads, so of a pipeline's races it finds those
between copies and the kernels' own loads and stores. It needs a thread a warpgroup: see NPROC in conftest.py.
"""

import dataclasses
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels import hopper_tools
from pallas_kernels.program import Program, Step


class RaceFound(AssertionError):
    """Two accesses of one place that nothing orders, at least one of them a write."""


def interpret(program: Program, *operands: jax.Array, races: bool = True) -> tuple[jax.Array, ...]:
    """The program's results. Raises RaceFound, naming the step; the interpreter prints both accesses."""

    def watched(step: Step) -> Step:
        def kernel(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            # Every kernel starts with a record of its own, so it is read before the next one runs.
            results = jax.block_until_ready(step.kernel(*arguments))
            if races and get_races().races_found:
                raise RaceFound(f"step {step.name}: see RACE DETECTED in the output")
            # The interpreter has no aliases: what a step did not write in place is still NaN there.
            before = dict(zip(step.operands, arguments, strict=True))
            pairs = zip(step.results, results, strict=True)
            return tuple(
                jnp.where(jnp.isnan(found), before[name], found) if name in before else found for name, found in pairs
            )

        return dataclasses.replace(step, kernel=kernel)

    # The interpreter has no rule for the wait, and runs one launch after the other anyway.
    mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races))
    with mock.patch.object(hopper_tools, "follow"), mode:
        return dataclasses.replace(program, steps=tuple(map(watched, program.steps))).run(*operands)
