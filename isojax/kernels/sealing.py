"""Seal every kernel that a policy's trainer and engine launch on sm90. Needs no card."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import jax
from tqdm import tqdm

from contracts.errors import BadConfig, UnsupportedModel
from isojax.kernels.calls import KernelCall, Parameter, Types, kernel_calls
from isojax.policy.policy import Policy
from pallas_kernels.hopper_regions import region_program, seal_region
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.region import REGIONS
from pallas_kernels.seal import SealedProgram, check_sealing_toolchain
from pallas_kernels.store import Bundle

DTYPE = "bfloat16"
Result = TypeVar("Result")


def seal_policy(
    policy: Policy, shapes: KernelShapes | None = None, *, processes: int = 1, show_progress: bool = False
) -> Bundle:
    """The bundle of a policy: one sealed program a region call, at every bucket of `shapes` (default: KernelShapes()).

    processes: how many lower at once, which changes no byte; more than one are spawned, so the calling script needs a
    main guard. Lowering holds Python's lock, so threads would gain nothing. show_progress: a bar on stderr.

    Raises ToolchainMismatch for a JAX that may not seal, BadConfig for a policy that is not bfloat16, UnsupportedModel
    for a region that no kernel takes at the policy's sizes, and UncoveredArithmetic.
    """
    check_sealing_toolchain()
    if policy.dtype != DTYPE:
        raise BadConfig(
            field="dtype", found=policy.dtype, allowed=DTYPE, reason="The sm90 kernels are for bfloat16 operands only."
        )
    shapes = (shapes or KernelShapes()).for_context(policy.config.max_position)
    calls = kernel_calls(policy, shapes)
    for call in calls:
        # Most refusals show before anything is lowered, which takes a minute.
        _refusing(region_program, call)
    return Bundle(seal_calls(calls, processes=processes, show_progress=show_progress), shapes)


def seal_calls(
    calls: Sequence[KernelCall], *, processes: int = 1, show_progress: bool = False
) -> tuple[SealedProgram, ...]:
    """The sealed program of every call, in order. Arguments and errors as for `seal_policy`."""
    with tqdm(_sealed(calls, processes), total=len(calls), desc="sealing", disable=not show_progress) as progress:
        return tuple(progress)


def _sealed(calls: Sequence[KernelCall], processes: int) -> Iterator[SealedProgram]:
    if processes == 1:
        yield from map(_seal, calls)
        return
    # Forked, a process would inherit JAX's threads in a state that deadlocks.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _stay_off_the_card) as pool:
        yield from pool.map(_seal, calls)


def _stay_off_the_card() -> None:
    # Lowering needs no device, and a context for every process would fill the memory of one.
    jax.config.update("jax_platforms", "cpu")


def _seal(call: KernelCall) -> SealedProgram:
    return _refusing(_lower, call)


def _lower(region: str, types: Types, parameters: Mapping[str, Parameter]) -> SealedProgram:
    return seal_region(REGIONS[region], types, parameters)


def _refusing(step: Callable[[str, Types, Mapping[str, Parameter]], Result], call: KernelCall) -> Result:
    """The step's result; what a kernel can't do becomes a refusal that names the region."""
    try:
        return step(call.region, call.types, dict(call.parameters))
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(
            field=f"region {call.region} on sm90",
            found=str(call),
            allowed="the sizes in docs/kernels.md",
            reason=f"{error}.",
        ) from error
