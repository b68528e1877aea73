"""Which ptxas turns sealed modules into machine code: the installed one, and the one that machine code names."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from contracts.errors import ToolchainMismatch

DUMPS, _DUMP = Path("/tmp"), "mosaic-gpu-*"
_NOTE = ".note.nv.tkinfo"


def ptxas_version() -> str:
    """Version of the first ptxas found, for example 13.0.88. Raises ToolchainMismatch without one.

    The plugin does not say which one it runs; where several versions are installed, this may name another. The gates
    on a card compare it with `compiled_by`.
    """
    from jax._src import lib

    program = next((path for path in places(str(lib.cuda_path)) if path.is_file()), Path("ptxas"))
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise _unknown(f"{program}: {error}") from error
    return parse_version(text)


def places(cuda_path: str) -> list[Path]:
    """Where one may be: the CUDA folder that JAX names, NVIDIA's wheels, the system's CUDA, the path."""
    package = importlib.util.find_spec("nvidia")
    wheels = [Path(place) for place in (package and package.submodule_search_locations) or ()]
    folders = [
        Path(cuda_path),
        *(found for wheel in wheels for found in sorted(wheel.glob("cu*"))),
        Path("/usr/local/cuda"),
    ]
    on_path = [Path(found)] if (found := shutil.which("ptxas")) else []
    return [*(folder / "bin" / "ptxas" for folder in folders), *on_path]


def parse_version(text: str) -> str:
    """The version in what `ptxas --version` prints. Raises ToolchainMismatch for anything else."""
    found = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    if found is None:
        raise _unknown(text.strip())
    return found[1]


@dataclass(frozen=True)
class Tool:
    """What made machine code, as the code itself says: `ptxas`, or a library that holds it, and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def compiled_by(compile_one: Callable[[], object], dumps: Path = DUMPS) -> Tool:
    """What made the machine code that `compile_one` compiles through JAX's plugin in this process.

    With MOSAIC_GPU_DUMP_TO set, the plugin writes each kernel's machine code into a new folder under /tmp for its
    disassembler and leaves it there. So does this: nothing tells it from one that another process makes meanwhile, and
    that one must find its own again. Raises ToolchainMismatch, with what there was, where there is no new one, where
    the code does not name what made it, or where two differ.
    """
    before = set(dumps.glob(_DUMP))
    with tempfile.TemporaryDirectory() as texts, _environment("MOSAIC_GPU_DUMP_TO", texts):
        compile_one()
        written = sorted(path.name for path in Path(texts).iterdir())
    # Another user's can't be read, and is not this process's.
    folders = [folder for folder in set(dumps.glob(_DUMP)) - before if folder.stat().st_uid == os.getuid()]
    codes = [path.read_bytes() for folder in folders for path in folder.glob("kernel.bin")]
    found = {tool_of(code) for code in codes}
    if len(found) != 1:
        raise _unknown(f"{sorted(map(str, found))} in {len(codes)} dumps of machine code; other dumps: {written}")
    return found.pop()


def tool_of(cubin: bytes) -> Tool:
    """The tool and version in the toolkit note of machine code (CUDA 13 and later write one).

    Raises ToolchainMismatch for anything without it.
    """
    note = _sections(cubin).get(_NOTE)
    if note is None:
        raise _unknown(f"{len(cubin)} bytes without a section {_NOTE}: {sorted(_sections(cubin))}")
    texts = [text.decode() for text in re.findall(rb"[ -~]{3,}", note)]
    for name, version in pairwise(texts):
        if "compilation tools" in version:
            return Tool(name, parse_version(version))
    raise _unknown(f"a section {_NOTE} that says {texts}")


def _sections(elf: bytes) -> dict[str, bytes]:
    """Contents by name of an ELF file of 64 bits; empty for anything else."""
    if len(elf) < 64 or elf[:5] != b"\x7fELF\x02":
        return {}
    start, size, count, names = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<3H", elf, 58)
    if size < 64 or names >= count or start + size * count > len(elf):
        return {}
    # Of each header: where the name begins, and offset and size of what it holds.
    headers = [struct.unpack_from("<I20xQQ", elf, start + size * index) for index in range(count)]
    text = elf[headers[names][1] :]
    return {text[name:].split(b"\0", 1)[0].decode(): elf[at : at + length] for name, at, length in headers}


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _unknown(found: str) -> ToolchainMismatch:
    return ToolchainMismatch(
        field="toolchain.ptxas",
        found=found,
        allowed="the ptxas of jax[cuda13]",
        reason="The contract names the ptxas that the gates ran with, so the engine must know its own.",
    )
