"""The kernel store: a bundle of sealed programs on disk, every hash recomputed when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from contracts.errors import BadBundle
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
BUNDLE_VERSION = 1
MANIFEST = "manifest.json"
MODULES = "modules"
#: More modules than this and compiling them at start takes too long; few shape buckets are the remedy.
MODULE_LIMIT = 160

_TOOLCHAIN = {
    "jax": SEALING_JAX,
    "module_format": MODULE_FORMAT,
    "device_kind": DEVICE_KIND,
    "architecture": ARCHITECTURE,
}


def save_bundle(folder: str | Path, programs: Iterable[SealedProgram]) -> str:
    """Writes ``manifest.json`` and one file a module into ``folder``; returns the bundle's SHA-256.

    Equal programs give equal bytes in any order and any process. Raises BadBundle over MODULE_LIMIT modules.
    """
    folder = Path(folder)
    entries = sorted((_describe(program) for program in programs), key=rfc8785.dumps)
    modules = {module.sha256: module.module for program in programs for module in program.modules}
    if len(modules) > MODULE_LIMIT:
        raise BadBundle(
            field="kernels.modules",
            found=len(modules),
            allowed=f"at most {MODULE_LIMIT}",
            reason="Every module is compiled when the engine starts; use fewer token buckets.",
        )
    (folder / MODULES).mkdir(parents=True, exist_ok=True)
    for digest, module in modules.items():
        (folder / MODULES / f"{digest}.mlirbc").write_bytes(module)
    body: dict[str, Any] = {
        "bundle_version": BUNDLE_VERSION,
        "toolchain": _TOOLCHAIN,
        "alignment": ALIGNMENT,
        "programs": entries,
    }
    digest = hashlib.sha256(rfc8785.dumps(body)).hexdigest()
    text = json.dumps({"sha256": digest, **body}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    return digest


def load_bundle(folder: str | Path) -> list[SealedProgram]:
    """Reads a bundle and recomputes every hash in it.

    Raises BadBundle, naming the file, where it is missing, damaged, truncated, of another version, lowered by another
    toolchain, or where a module's bytes are not those that the manifest names.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder / MANIFEST)
    try:
        programs = [_restore(entry, folder / MODULES) for entry in manifest["programs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise BadBundle(
            field=str(folder / MANIFEST),
            found=f"{type(error).__name__}: {error}",
            allowed=f"the layout of bundle version {BUNDLE_VERSION}",
            reason="The manifest's hash is right but it holds no list of programs: another program wrote it.",
        ) from error
    named = {f"{digest}.mlirbc" for program in programs for digest in program.digests}
    foreign = sorted(path.name for path in (folder / MODULES).iterdir() if path.name not in named)
    if foreign:
        raise BadBundle(
            field=str(folder / MODULES),
            found=foreign,
            allowed="only the modules that the manifest names",
            reason="A foreign file in a bundle means that two exports were mixed; export again into an empty folder.",
        )
    return programs


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
    for name, expected in (("toolchain", _TOOLCHAIN), ("alignment", ALIGNMENT)):
        if manifest.get(name) != expected:
            raise refuse(f"{name} {manifest.get(name)}", expected, "Another toolchain lowered these kernels.")
    return manifest


def _describe(program: SealedProgram) -> dict[str, Any]:
    return {
        "region": program.region,
        "version": program.version,
        "constants": {name: _bits(value) for name, value in program.constants},
        "buffers": {
            name: {"shape": list(buffer.shape), "dtype": buffer.dtype} for name, buffer in program.buffers.items()
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
        buffers={name: Buffer(tuple(b["shape"]), b["dtype"]) for name, b in sorted(entry["buffers"].items())},
        operands=tuple(entry["operands"]),
        results=tuple(entry["results"]),
        modules=tuple(_read_module(module, folder) for module in entry["modules"]),
    )


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
