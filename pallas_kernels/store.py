"""The kernel store: a bundle of sealed programs on disk, every hash recomputed when it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from contracts.errors import BadBundle, BadConfig
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.program import Buffer
from pallas_kernels.seal import (
    ALIGNMENT,
    ARCHITECTURE,
    DEVICE_KIND,
    MODULE_FORMAT,
    SEALING_JAX,
    SealedModule,
    SealedProgram,
)

#: Raised whenever the manifest's layout changes.
BUNDLE_VERSION = 2
MANIFEST = "manifest.json"
MODULES = "modules"
#: More modules than this and compiling them at start takes too long; few shape buckets are the remedy.
MODULE_LIMIT = 192

#: The one toolchain whose modules this version reads.
_TOOLCHAIN = {
    "jax": SEALING_JAX,
    "jaxlib": SEALING_JAX,
    "module_format": MODULE_FORMAT,
    "device_kind": DEVICE_KIND,
    "architecture": ARCHITECTURE,
}


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Every sealed kernel of one policy and the shapes they serve.

    ``ptxas`` is the version that made machine code of the modules when the gates ran. Sealing needs no card and stops
    before ptxas, so an export leaves it None; whoever runs the gates on a card records it.
    """

    programs: tuple[SealedProgram, ...]
    shapes: KernelShapes
    ptxas: str | None = None

    @property
    def toolchain(self) -> dict[str, str | None]:
        """What lowered the modules, and what compiled them."""
        return {**_TOOLCHAIN, "ptxas": self.ptxas}

    @property
    def modules(self) -> dict[str, SealedModule]:
        """Each module once, by its SHA-256."""
        return {module.sha256: module for program in self.programs for module in program.modules}

    @cached_property
    def sha256(self) -> str:
        """Of the manifest: the same for equal programs in any order and any process."""
        return hashlib.sha256(rfc8785.dumps(self._body)).hexdigest()

    @property
    def manifest(self) -> str:
        """The manifest's text."""
        return json.dumps({"sha256": self.sha256, **self._body}, indent=1, sort_keys=True) + "\n"

    @cached_property
    def _body(self) -> dict[str, Any]:
        return {
            "bundle_version": BUNDLE_VERSION,
            "toolchain": self.toolchain,
            "alignment": ALIGNMENT,
            "shapes": self.shapes.to_json(),
            "programs": sorted((_describe(program) for program in self.programs), key=rfc8785.dumps),
        }


def save_bundle(folder: str | Path, bundle: Bundle) -> None:
    """Writes ``manifest.json`` and one file a module into ``folder``. Raises BadBundle over MODULE_LIMIT modules."""
    folder = Path(folder)
    modules = bundle.modules
    if len(modules) > MODULE_LIMIT:
        raise BadBundle(
            field="kernels.modules",
            found=len(modules),
            allowed=f"at most {MODULE_LIMIT}",
            reason="Every module is compiled when the engine starts; use fewer buckets.",
        )
    (folder / MODULES).mkdir(parents=True, exist_ok=True)
    for digest, module in modules.items():
        (folder / MODULES / f"{digest}.mlirbc").write_bytes(module.module)
    (folder / MANIFEST).write_text(bundle.manifest, encoding="utf-8")


def load_bundle(folder: str | Path) -> Bundle:
    """Reads a bundle and recomputes every hash in it.

    Raises BadBundle, naming the file, where it is missing, damaged, truncated, of another version, lowered by another
    toolchain, or where a module's bytes are not those that the manifest names.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder / MANIFEST)
    try:
        programs = tuple(_restore(entry, folder / MODULES) for entry in manifest["programs"])
        shapes = KernelShapes.from_json(manifest["shapes"])
    except (KeyError, TypeError, ValueError, BadConfig) as error:
        raise BadBundle(
            field=str(folder / MANIFEST),
            found=f"{type(error).__name__}: {error}",
            allowed=f"the layout of bundle version {BUNDLE_VERSION}",
            reason="The manifest's hash is right but not what it holds: another program wrote it.",
        ) from error
    named = {f"{digest}.mlirbc" for program in programs for digest in program.digests}
    expected = {folder / MANIFEST, folder / MODULES, *(folder / MODULES / name for name in named)}
    foreign = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path not in expected)
    if foreign:
        raise BadBundle(
            field=str(folder),
            found=foreign,
            allowed="only the manifest and the modules that it names",
            reason="A foreign file in a bundle means that two exports were mixed; export again into an empty folder.",
        )
    return Bundle(programs, shapes, manifest["toolchain"]["ptxas"])


def _read_manifest(path: Path) -> dict[str, Any]:
    def refuse(found: object, allowed: object, reason: str) -> BadBundle:
        return BadBundle(field=str(path), found=found, allowed=allowed, reason=reason)

    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise refuse("no such file", "a kernel bundle", "Run `isojax export --arch sm90` first.") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise refuse(str(error), "JSON", "The manifest is damaged or truncated.") from error
    if not isinstance(manifest, dict) or "bundle_version" not in manifest:
        raise refuse(type(manifest).__name__, "an object with bundle_version", "This is no kernel bundle.")
    if manifest["bundle_version"] != BUNDLE_VERSION:
        raise refuse(
            f"bundle_version {manifest['bundle_version']}", BUNDLE_VERSION, "Export again with this version of isojax."
        )
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(rfc8785.dumps(body)).hexdigest()
    if manifest.get("sha256") != digest:
        raise refuse(f"sha256 {manifest.get('sha256')}", digest, "The manifest was changed after it was sealed.")
    if manifest.get("alignment") != ALIGNMENT:
        raise refuse(f"alignment {manifest.get('alignment')}", ALIGNMENT, "Buffers would lie at other addresses.")
    toolchain = manifest.get("toolchain")
    if not isinstance(toolchain, dict) or toolchain.keys() != {*_TOOLCHAIN, "ptxas"}:
        raise refuse(f"toolchain {toolchain}", sorted({*_TOOLCHAIN, "ptxas"}), "It does not say what made the kernels.")
    for name, expected in _TOOLCHAIN.items():
        if toolchain[name] != expected:
            raise refuse(
                f"toolchain.{name} {toolchain[name]}",
                expected,
                "Another toolchain lowered these; export again.",
            )
    return manifest


def _describe(program: SealedProgram) -> dict[str, Any]:
    return {
        "region": program.region,
        "version": program.version,
        "constants": {name: _bits(value) for name, value in program.constants},
        "buffers": {
            name: {
                "shape": list(buffer.shape),
                "dtype": buffer.dtype,
                "leading_at_most": buffer.leading_at_most,
            }
            for name, buffer in program.buffers.items()
        },
        "operands": list(program.operands),
        "results": list(program.results),
        "modules": [
            {
                "name": module.name,
                "sha256": module.sha256,
                "bytes": len(module.module),
                "operands": list(module.operands),
                "results": list(module.results),
                "aliases": [list(pair) for pair in module.aliases],
            }
            for module in program.modules
        ],
    }


def _restore(entry: dict[str, Any], folder: Path) -> SealedProgram:
    return SealedProgram(
        region=str(entry["region"]),
        version=str(entry["version"]),
        constants=tuple(sorted((name, _value(bits)) for name, bits in entry["constants"].items())),
        buffers={name: _buffer(value) for name, value in sorted(entry["buffers"].items())},
        operands=tuple(entry["operands"]),
        results=tuple(entry["results"]),
        modules=tuple(_read_module(module, folder) for module in entry["modules"]),
    )


def _buffer(entry: dict[str, Any]) -> Buffer:
    return Buffer(tuple(entry["shape"]), str(entry["dtype"]), bool(entry["leading_at_most"]))


def _read_module(entry: dict[str, Any], folder: Path) -> SealedModule:
    path = folder / f"{entry['sha256']}.mlirbc"
    if not path.is_file():
        raise BadBundle(
            field=str(path), found="no such file", allowed="the module's bytes", reason="The bundle is incomplete."
        )
    module = path.read_bytes()
    digest = hashlib.sha256(module).hexdigest()
    if digest != entry["sha256"]:
        raise BadBundle(
            field=str(path),
            found=f"sha256 {digest}, {len(module)} bytes",
            allowed=f"sha256 {entry['sha256']}, {entry['bytes']} bytes",
            reason=f"The module of {entry['name']} is damaged, truncated or another kernel's.",
        )
    aliases = tuple((int(operand), int(result)) for operand, result in entry["aliases"])
    return SealedModule(entry["name"], module, tuple(entry["operands"]), tuple(entry["results"]), aliases)


def _bits(value: int | float | bool | str) -> int | bool | str | dict[str, str]:
    # Floats as bit patterns, so that no decimal conversion can change one.
    if isinstance(value, float):
        return {"float64": np.float64(value).view(np.uint64).item().to_bytes(8, "big").hex()}
    return value


def _value(bits: int | bool | str | dict[str, str]) -> int | float | bool | str:
    if isinstance(bits, dict):
        return float(np.uint64(int(bits["float64"], 16)).view(np.float64))
    return bits
