"""The suite of gates on a card: what it needs, what it prepares, what its passing shows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
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
from isojax.evidence import small_policy
from isojax.evidence.gates import Gate, GateSuite
from isojax.evidence.mesh_gate import mesh_gate, require_provable
from isojax.evidence.proof import Proof, check_ptxas, open_unproved
from isojax.kernels import packing_of
from isojax.kernels.calls import KernelCall
from isojax.mesh_policy import open_mesh
from isojax.policy.policy import Policy
from isojax.weights.load import load_policy
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


def make_suite(folder: Path | None, mesh: Mapping[str, int]) -> GateSuite:
    """The gates; nothing is looked at, sealed or compiled before the suite's `prepare`. mesh: see `Proof`."""
    opened = cache(partial(_open, folder))
    meshes = any(degree > 1 for degree in mesh.values())

    def gate(name: str, check: Callable[[Card], str]) -> Gate:
        return Gate(name, ARCHITECTURE, _claim(check), lambda: check(opened()[0]))

    def prepare() -> None:
        check_card()
        if meshes:
            # Before minutes of work that would end in a refusal.
            require_provable(_policy(folder), mesh)
            require_cards(open_mesh(mesh).devices.flat, torch.cuda.get_device_name())
        opened()

    gates = [gate(name, check) for name, check in CHECKS]
    if meshes:
        gates.append(Gate("mesh", ARCHITECTURE, _claim(mesh_gate), lambda: mesh_gate(_policy(folder), mesh)))
    return GateSuite(ARCHITECTURE, tuple(gates), prepare, lambda: replace(opened()[1](), mesh=mesh))


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
    # The gates share the card with JAX, whose client must not take all of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def require_cards(devices: Iterable[jax.Device], kind: str) -> None:
    """Refuse a mesh of anything but cards of one kind, which is what a proof is about. Raises ToolchainMismatch."""
    found = Counter(f"{device.device_kind} ({device.platform})" for device in devices)
    if set(found) != {f"{kind} (gpu)"}:
        raise ToolchainMismatch(
            field="mesh",
            found=", ".join(f"{count} {name}" for name, count in found.items()),
            allowed=f"cards alone, each an {kind}",
            reason="These are the devices that JAX takes first; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES decide which.",
        )


def planted_calls(bundle: Bundle) -> list[KernelCall]:
    """Calls with other constants that the gates plant as faults, each once."""
    found: dict[KernelCall, None] = {}
    for family in families(bundle.programs):
        for program in family.ends:
            for fault in faults_of(program, ALL_KEYS):
                if fault.constants:
                    found[faulty_call(program, fault)] = None
    return list(found)


def _claim(check: Callable[..., str]) -> str:
    return (check.__doc__ or "").strip().partition("\n")[0]


def _policy(folder: Path | None) -> Policy:
    """The policy whose kernels this process emits."""
    if folder is not None:
        # What this process emits is said by `_open`.
        return load_policy(folder, emits_kernels=False)
    policy = small_policy.small_policy()
    policy.packing, policy.row_buckets = packing_of(small_policy.SHAPES), small_policy.SHAPES.head_rows
    return policy


def _open(folder: Path | None) -> tuple[Card, Callable[[], Proof]]:
    check_card()
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
    from isojax.kernels.sealing import seal_policy

    return seal_policy(small_policy.small_policy(), small_policy.SHAPES, processes=processes, show_progress=True)


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
