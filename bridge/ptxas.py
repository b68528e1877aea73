"""Which ptxas turns this process's sealed modules into machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from contracts.errors import ToolchainMismatch


def ptxas_version() -> str:
    """Version of the ptxas that JAX's compiler runs, for example 13.0.88. Raises ToolchainMismatch without one."""
    from jax._src import lib

    program = Path(lib.cuda_path or "/usr/local/cuda") / "bin" / "ptxas"
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise _unknown(f"{program}: {error}") from error
    return parse_version(text)


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
