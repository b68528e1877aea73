"""The suite of gates on a card: what it needs, what it prepares, what its passing shows."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridge.gates.attention import attention_bindings_gate
from bridge.gates.card import Card
from bridge.gates.families import families
from bridge.gates.faults import faults_of, faulty_call
from bridge.gates.head import fused_head_gate
from bridge.gates.reference import reference_gate
from bridge.gates.repeat import repeatability_gate
from bridge.gates.rows import row_invariance_gate
from bridge.gates.trainer import trainer_and_engine_gate
from contracts.errors import ToolchainMismatch
from isojax.evidence.gates import Gate, GateSuite
from isojax.evidence.proof import Proof, check_ptxas, open_unproved
from isojax.kernels.calls import KernelCall
from pallas_kernels.seal import ARCHITECTURE, DEVICE_KIND, SealedProgram, check_sealing_toolchain
from pallas_kernels.store import Bundle

if TYPE_CHECKING:
    from bridge.launcher import Compiler

CHECKS: tuple[tuple[str, Callable[[Card], str]], ...] = (
    ("row_invariance", row_invariance_gate),
    ("attention_bindings", attention_bindings_gate),
    ("fused_head", fused_head_gate),
    ("trainer_and_engine", trainer_and_engine_gate),
    ("repeatability", repeatability_gate),
    ("reference", reference_gate),
)
ALL_KEYS = 2**30
"""More keys than any split has."""


def make_suite(folder: Path | None) -> GateSuite:
    """The gates; nothing is looked at, sealed or compiled before the suite's `prepare`."""
    opened = cache(partial(_open, folder))

    def gate(name: str, check: Callable[[Card], str]) -> Gate:
        claim = (check.__doc__ or "").strip()
        return Gate(name, ARCHITECTURE, claim, lambda: check(opened()[0]))

    def prepare() -> None:
        opened()

    gates = tuple(gate(name, check) for name, check in CHECKS)
    return GateSuite(ARCHITECTURE, gates, prepare, lambda: opened()[1]())


def check_card() -> None:
    """Raises ToolchainMismatch on a machine without a card that the kernels are for."""
    if not torch.cuda.is_available():
        raise ToolchainMismatch(
            field="device",
            found=f"no CUDA device that torch {torch.__version__} can use",
            allowed=f"a card of architecture {ARCHITECTURE}, such as {DEVICE_KIND}",
            reason="These gates launch the sealed kernels; `isojax verify` alone runs those of the CPU.",
        )
    check_sealing_toolchain()


def planted_calls(bundle: Bundle) -> list[KernelCall]:
    """Calls with other constants that the gates plant as faults, each once."""
    found: dict[KernelCall, None] = {}
    for family in families(bundle.programs):
        for program in family.ends:
            for fault in faults_of(program, ALL_KEYS):
                if fault.constants:
                    found[faulty_call(program, fault)] = None
    return list(found)


def _open(folder: Path | None) -> tuple[Card, Callable[[], Proof]]:
    check_card()
    # The gates share the card with JAX, whose client must not take all of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Imported here: both load Pallas, and the first one JAX's plugin for CUDA.
    from bridge.launcher import Compiler, Launcher
    from isojax.kernels.sealing import seal_calls
    from pallas_kernels import kernel_source

    device = torch.device("cuda", torch.cuda.current_device())
    compiler = Compiler(device)
    processes = len(os.sched_getaffinity(0))
    contract, bundle = open_unproved(folder) if folder is not None else (None, _small_bundle(processes))
    machine = cache(partial(_machine, compiler, bundle))
    if contract is not None:
        # Before minutes of work that could not be recorded.
        check_ptxas(contract, machine())
    calls = planted_calls(bundle)
    planted = dict(zip(calls, seal_calls(calls, processes=processes, show_progress=True), strict=True))
    programs: list[SealedProgram] = [*bundle.programs, *planted.values()]
    compiler.compile_all(programs, threads=processes)
    # What the trainer's lowering emits from now on, as if the policy had been loaded.
    kernel_source.LOADED.add(bundle.programs)
    return Card(bundle, device, lambda program: Launcher(program, compiler), planted.__getitem__), machine


def _small_bundle(processes: int) -> Bundle:
    from isojax.evidence.small_policy import SHAPES, small_policy
    from isojax.kernels.sealing import seal_policy

    return seal_policy(small_policy(), SHAPES, processes=processes, show_progress=True)


def _machine(compiler: Compiler, bundle: Bundle) -> Proof:
    from bridge.ptxas import compiled_by, ptxas_version

    smallest = min(bundle.modules.values(), key=lambda module: len(module.module))
    tool = compiled_by(lambda: compiler.compile_anew(smallest))
    looked_up = ptxas_version()
    if tool.version != looked_up:
        raise ToolchainMismatch(
            field="toolchain.ptxas",
            found=f"machine code by {tool}",
            allowed=f"{looked_up}, which the engine finds installed and reports",
            reason="The engine would report another compiler than it runs. Leave one CUDA toolchain on this machine's "
            "path, the one that JAX's plugin uses.",
        )
    return Proof(torch.cuda.get_device_name(), tool.version)
