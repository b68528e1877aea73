"""Which ptxas is installed to turn sealed modules into machine code."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from contracts.errors import ToolchainMismatch


def ptxas_version() -> str:
    """Version of the first ptxas found, for example 13.0.88. Raises ToolchainMismatch without one.

    The plugin does not say which one it runs; where several versions are installed, this may name another.
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


def _unknown(found: str) -> ToolchainMismatch:
    return ToolchainMismatch(
        field="toolchain.ptxas",
        found=found,
        allowed="the ptxas of jax[cuda13]",
        reason="The contract names the ptxas that the gates ran with, so the engine must know its own.",
    )
