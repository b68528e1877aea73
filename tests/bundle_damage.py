"""Ways to damage an exported sm90 policy, each of them careful: every hash that can be made right again is right.

All start from a folder that loads, and say what must refuse it and in which words.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contracts import ExecutionContract, FrozenMap, load_contract, save_contract
from contracts.errors import BadBundle, Refusal
from isojax.kernels import KERNELS_FOLDER, Bundle, load_kernels
from pallas_kernels.seal import SealedProgram
from pallas_kernels.store import MODULES, save_bundle

OTHER_PTXAS = "12.0.0"
Change = Callable[[SealedProgram], SealedProgram]


class Damage(NamedTuple):
    """`apply` changes a policy folder in place; loading it must then raise `refusal`, with `says` (a pattern)."""

    apply: Callable[[Path], object]
    says: str
    refusal: type[Refusal] = BadBundle


def rewritten(folder: Path, **changes: object) -> Bundle:
    """Another bundle in place of the folder's own: consistent in itself, but not the contract's."""
    bundle = dataclasses.replace(load_kernels(folder, load_contract(folder)), **changes)
    shutil.rmtree(folder / KERNELS_FOLDER)
    save_bundle(folder / KERNELS_FOLDER, bundle)
    return bundle


def exchanged(bundle: Bundle, region: str, change: Change) -> tuple[SealedProgram, ...]:
    """The bundle's programs with the first one of a region changed."""
    index = next(i for i, program in enumerate(bundle.programs) if program.region == region)
    programs = list(bundle.programs)
    programs[index] = change(programs[index])
    return tuple(programs)


def _bundle(folder: Path) -> Bundle:
    return load_kernels(folder, load_contract(folder))


def flip_a_byte(folder: Path) -> None:
    """In the middle of one module."""
    path = min((folder / KERNELS_FOLDER / MODULES).iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_in_the_manifest(folder: Path) -> None:
    """Two sizes of the norm run each other's modules."""
    bundle = _bundle(folder)
    first, second = [program for program in bundle.programs if program.region == "rms_norm"][:2]
    others = [program for program in bundle.programs if program not in (first, second)]
    swapped = dataclasses.replace(first, modules=second.modules), dataclasses.replace(second, modules=first.modules)
    rewritten(folder, programs=(*others, *swapped))


def swap_in_the_contract(folder: Path) -> None:
    """The digests of two sizes of the norm change places, and the contract's identities follow."""
    contract = load_contract(folder)
    entry = contract.owner("rms_norm", "trainer_fwd")
    names, digests = list(entry.kernel_digests), list(entry.kernel_digests.values())
    turned = FrozenMap(dict(zip(names, [*digests[1:], digests[0]], strict=True)))
    swapped = entry.model_copy(update={"kernel_digests": turned})
    composition = tuple(swapped if item is entry else item for item in contract.composition)
    save_contract(contract.replaced(composition=composition), folder)


def retile(folder: Path, change: Change) -> None:
    """One matmul is sealed anew with another tile, here alone."""
    rewritten(folder, programs=exchanged(_bundle(folder), "matmul", change))


def with_other_bytes(program: SealedProgram) -> SealedProgram:
    """Stands for a kernel that was sealed anew, where no kernel can be sealed."""
    return dataclasses.replace(program, modules=(dataclasses.replace(program.modules[0], module=b"another tile"),))


def with_another_tile(program: SealedProgram) -> SealedProgram:
    """Really sealed anew: the same matmul, bit for bit, with a tile that nobody committed. Needs the sealing JAX."""
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_choice import SMALL_TOKENS
    from pallas_kernels.matmul.hopper_large import LargeTile
    from pallas_kernels.matmul.hopper_small import SmallTile
    from pallas_kernels.seal import seal_program

    (T, K), (N, _) = (program.buffers[name].shape for name in ("x", "w"))
    tile = SmallTile(depth=16, stages=3) if T <= SMALL_TOKENS else LargeTile(columns=64, depth=16, stages=3)
    constants = dict(program.constants)
    options = {"bias": "bias" in program.operands, **constants}
    sealed = seal_program("matmul", program.version, constants, matmul_program(T, N, K, tile=tile, **options))
    assert sealed.digests != program.digests
    return sealed


def resplit(folder: Path) -> None:
    """The manifest gives the same attention kernels another constant."""

    def change(program: SealedProgram) -> SealedProgram:
        constants = tuple((name, 256 if name == "split" else value) for name, value in program.constants)
        return dataclasses.replace(program, constants=constants)

    rewritten(folder, programs=exchanged(_bundle(folder), "paged_attention", change))


def other_ptxas_in_the_contract(folder: Path) -> ExecutionContract:
    """The contract names another compiler than the manifest."""
    contract = load_contract(folder)
    toolchain = contract.toolchain.model_copy(update={"ptxas": OTHER_PTXAS})
    changed = contract.replaced(toolchain=toolchain)
    save_contract(changed, folder)
    return changed


def other_ptxas_on_both_sides(folder: Path) -> None:
    """Manifest and contract agree on a compiler that is not the one that is installed."""
    bundle = rewritten(folder, ptxas=OTHER_PTXAS)
    contract = load_contract(folder)
    changes = {"ptxas": OTHER_PTXAS, "kernel_manifest": bundle.sha256}
    save_contract(contract.replaced(toolchain=contract.toolchain.model_copy(update=changes)), folder)


def damages(sealed_anew: Change = with_other_bytes) -> dict[str, Damage]:
    """Every damage by name. sealed_anew: the first matmul with another tile."""
    other_tile = r"region matmul, kernel matmul x\[\d+,\d+\].*other constants"
    swapped = r"region rms_norm, kernel rms_norm x\[\d+,\d+\]"
    ptxas = r"toolchain\.ptxas: found "
    return {
        "one byte of a module flipped": Damage(flip_a_byte, r"[0-9a-f]{64}\.mlirbc"),
        "two kernels swapped in the manifest": Damage(swap_in_the_manifest, swapped),
        "two kernels' digests swapped in the contract": Damage(swap_in_the_contract, swapped),
        "another tile in the engine's bundle alone": Damage(lambda folder: retile(folder, sealed_anew), other_tile),
        "another split in the manifest": Damage(resplit, r"region paged_attention, kernel .* split=\d+.*: found"),
        "another ptxas in the manifest": Damage(lambda f: rewritten(f, ptxas=OTHER_PTXAS), ptxas + OTHER_PTXAS),
        "another ptxas in the contract": Damage(other_ptxas_in_the_contract, ptxas + ".*" + OTHER_PTXAS),
    }
