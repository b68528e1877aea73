"""Writing into a policy folder what its gates proved on a card: the contract and the kernels' manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from contracts import FILE_NAME, Claims, ExecutionContract, load_contract, topology
from contracts.errors import BadConfig, ToolchainMismatch
from isojax.contract import SM90_GATE
from isojax.kernels import KERNELS_FOLDER, load_kernels
from isojax.rl.files import write_atomically
from pallas_kernels.store import MANIFEST, Bundle


@dataclasses.dataclass(frozen=True)
class Proof:
    """The machine on which all gates passed. device_kind as JAX names it; ptxas: version that made the machine code;
    mesh: degrees by axis of the mesh that was proved there, none of one device."""

    device_kind: str
    ptxas: str
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)


def open_unproved(folder: Path) -> tuple[ExecutionContract, Bundle]:
    """The contract and the kernels that a proof is about. Raises BadConfig for a policy without sealed kernels.

    A contract that is proved already may be proved on one more kind of card. Raises also what `load_kernels` does.
    """
    contract = load_contract(folder)
    if contract.arch.startswith("cpu-"):
        raise BadConfig(
            field="FOLDER",
            found=f"{folder}: a contract for {contract.arch}",
            allowed="a policy with sealed kernels, from `isojax export --arch sm90`",
            reason="The form for a CPU is proved where it runs, by `isojax verify`.",
        )
    return contract, load_kernels(folder, contract)


def check_ptxas(contract: ExecutionContract, proof: Proof) -> None:
    """Raises ToolchainMismatch where the contract was proved with another ptxas: its bits are those of that one."""
    known = contract.toolchain.ptxas
    if known is not None and known != proof.ptxas:
        raise ToolchainMismatch(
            field="toolchain.ptxas",
            found=proof.ptxas,
            allowed=known,
            reason="This policy was proved with the allowed version. Install it, or export the policy anew and prove "
            "that folder here; the two are different numerical policies.",
        )


def write_proof(folder: Path, proof: Proof) -> ExecutionContract:
    """Marks the folder's contract as proved on this kind of card with this ptxas; returns what was written.

    It claims the proof's mesh and each of its axes alone, in place of what it claimed of meshes before; where another
    kind of card is claimed as well, only what was proved on both. Both files are replaced whole, the kernels' manifest
    first: a crash between the two leaves a folder that is refused by name, never one that claims too much. Raises what
    `open_unproved` and `check_ptxas` do.
    """
    contract, bundle = open_unproved(folder)
    check_ptxas(contract, proof)
    compiled = dataclasses.replace(bundle, ptxas=proof.ptxas)
    toolchain = contract.toolchain.model_copy(update={"ptxas": proof.ptxas, "kernel_manifest": compiled.sha256})
    kinds = tuple(sorted({*contract.claims.device_kinds, proof.device_kind}))
    meshes = topology(SM90_GATE, _invariant(contract.claims, proof))
    claims = contract.claims.model_copy(update={"state": "proved", "device_kinds": kinds, "topology": meshes})
    proved = contract.replaced(toolchain=toolchain, claims=claims)
    write_atomically(folder / KERNELS_FOLDER / MANIFEST, compiled.manifest)
    write_atomically(folder / FILE_NAME, proved.canonical_bytes().decode())
    return proved


def _invariant(claims: Claims, proof: Proof) -> dict[str, tuple[int, ...]]:
    """The degrees, by axis, that move no bit."""
    wanted = {axis: degree for axis, degree in proof.mesh.items() if degree > 1}
    if set(claims.device_kinds) - {proof.device_kind}:
        wanted = {axis: degree for axis, degree in wanted.items() if degree in claims.axis(axis).allowed}
    return {axis: (1, degree) for axis, degree in wanted.items()}
