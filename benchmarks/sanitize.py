"""Every kernel at small sizes under compute-sanitizer's memcheck and racecheck.

    python benchmarks/sanitize.py [--tool memcheck] [--region matmul] [--out FILE]

Each region runs in a process of its own, so that one that fails does not hide the others. Exits 1 where the sanitizer
found an error or a kernel did not run, 2 where there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from isojax.evidence.small_policy import SHAPES, small_policy
from isojax.kernels.calls import KernelCall, kernel_calls
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.seal import SealedProgram

TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/cuda*/bin")
#: What the sanitizer exits with when it found an error.
FOUND = 86


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this one")
    parser.add_argument("--region", action="append", help="only this one; may be given several times")
    parser.add_argument("--seconds", type=int, default=180, help="limit of one region under one tool")
    parser.add_argument("--processes", type=int, default=8, help="regions at once")
    parser.add_argument("--out", type=Path, default=Path("sanitize.json"))
    parser.add_argument("--launch", metavar="REGION", help="launch this region's kernels here, without a sanitizer")
    arguments = parser.parse_args()
    if arguments.launch:
        launch(arguments.launch)
        return 0
    program = find_sanitizer()
    if program is None:
        print(f"no compute-sanitizer on PATH or in {', '.join(PLACES)}: nothing was checked", flush=True)
        return 2
    print(program, flush=True)
    content: dict[str, Any] = {"sanitizer": program, "date": date.today().isoformat(), "command": shlex.join(sys.argv)}
    results = content["results"] = {}
    jobs = list(itertools.product(arguments.tool or TOOLS, arguments.region or regions()))
    with ThreadPoolExecutor(arguments.processes) as pool:
        checks = {pool.submit(check, program, *job, arguments.seconds): job for job in jobs}
        for done in as_completed(checks):
            found, name = done.result(), " ".join(checks[done])
            results[name] = found
            print(f"{'clean' if found['clean'] else 'FAILED'}  {name}: {found['summary']}", flush=True)
            arguments.out.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if all(found["clean"] for found in results.values()) else 1


def find_sanitizer() -> str | None:
    """compute-sanitizer on the path, or in a folder of a CUDA toolkit, also one from NVIDIA's wheels."""
    if found := shutil.which("compute-sanitizer"):
        return found
    places = [path for pattern in PLACES for path in Path("/").glob(pattern.removeprefix("/"))]
    places += [path for entry in sys.path for path in Path(entry or ".").glob("nvidia/cu*/bin")]
    return next((str(place / "compute-sanitizer") for place in places if (place / "compute-sanitizer").is_file()), None)


def regions() -> list[str]:
    """Every region of the small policy."""
    return sorted({call.region for call in _calls()})


def check(program: str, tool: str, region: str, seconds: int) -> dict[str, object]:
    """One region under one tool: whether it is clean, the last lines, the exit code."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    command += [sys.executable, __file__, "--launch", region]
    # The caching allocator would hide a read beyond a tensor's end inside of its large blocks.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        return {"clean": False, "summary": f"over {seconds} s", "output": text[-4000:], "exit_code": None}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    # The last line of the launches says that they came to an end.
    ran = any(line.startswith(f"launched {region}") for line in lines)
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), "no summary")
    found = {"clean": ran and done.returncode == 0, "summary": summary, "exit_code": done.returncode}
    return found if found["clean"] else {**found, "output": done.stdout[-4000:]}


def launch(region: str) -> None:
    """Seals, compiles and launches one region of the small policy at its small buckets."""
    import torch

    from bridge.gates.card import Card, call_of
    from bridge.gates.inputs import operands_of
    from bridge.launcher import Compiler, Launcher
    from isojax.kernels.sealing import seal_calls
    from pallas_kernels.store import Bundle

    device = torch.device("cuda:0")
    torch.zeros(1, device=device)
    bundle = Bundle(seal_calls([call for call in _calls() if call.region == region]), _shapes())
    compiler = Compiler(device)
    card = Card(bundle, device, lambda program: Launcher(program, compiler), _no_fault)
    for program in bundle.programs:
        card.launch(program, operands_of(card, program))
        torch.cuda.synchronize()
        print(call_of(program), flush=True)
    print(f"launched {region}: {len(bundle.programs)} programs", flush=True)


def _no_fault(call: KernelCall) -> SealedProgram:
    raise RuntimeError("no fault is planted here")


def _shapes() -> KernelShapes:
    """Few tokens and short histories: a sanitizer makes a kernel a hundred times slower."""
    return dataclasses.replace(
        SHAPES, token_buckets=(8, 136), head_rows=(8,), trainer_tokens=(256,), max_pages=64, max_context=640
    )


def _calls() -> list[KernelCall]:
    return kernel_calls(small_policy(), _shapes())


if __name__ == "__main__":
    sys.exit(main())
