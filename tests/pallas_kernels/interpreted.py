"""Runs a program in Pallas's GPU interpreter, which executes the kernels' own source and watches for data races.

In jax 0.11.2 it executes wgmma at once and does not watch what it reads. A pipeline whose producer overtakes its
consumers fails nevertheless, because a barrier then completes a phase that nobody has waited for.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

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
            return tuple(results)

        return dataclasses.replace(step, kernel=kernel)

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        return dataclasses.replace(program, steps=tuple(map(watched, program.steps))).run(*operands)
