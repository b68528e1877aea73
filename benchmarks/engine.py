"""vLLM with isojax's kernels against stock vLLM on one card: seconds, tokens a second, device time a decode step.

    python benchmarks/engine.py FOLDER --workload 1x128x512 --workload 32x128x512 --workload 256x128x512 --out FILE

FOLDER is a policy with sealed kernels, with or without weights, as `engine_parity.py --prepare` writes it. Every arm
runs on the same weights in a process of its own. They start together, since starting takes longer than measuring, and
measure one after the other while the others do nothing: stock vLLM, its own batch-invariant mode, ours as a rollout
uses it, and ours asked as stock vLLM is. A ratio below 1 is faster than stock vLLM.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import at_least
from engine_arm import ENVIRONMENTS, OURS, Workload

BASELINE = "stock"
ARMS = ("batch_invariant", "isojax")
WORKLOADS = ("1x128x512", "32x128x512", "256x128x512")


def main() -> int:
    """Parses the command line; returns the exit code, 1 where an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", action="append", help="BATCHxINxOUT, in requests and tokens")
    parser.add_argument("--arm", action="append", choices=ENVIRONMENTS, help="only this one beside stock")
    parser.add_argument("--weights", type=Path, help="a .gguf file or checkpoint; else the folder's, or random ones")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    arguments = parser.parse_args()
    workloads = [str(text) for text in arguments.workload or WORKLOADS]
    for text in workloads:
        Workload.parse(text)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        # In a process of its own, whose memory on the card is given back.
        writer = multiprocessing.get_context("spawn").Process(
            target=write_folders, args=(arguments.folder, arguments.weights, Path(scratch))
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            return 1
        chosen = dict.fromkeys((BASELINE, *(arguments.arm or ARMS)))
        options = [part for text in workloads for part in ("--workload", text)] + ["--repeats", str(arguments.repeats)]
        started = {arm: Arm.start(arm, Path(scratch), options) for arm in chosen}
        for arm in started.values():
            arm.wait_until_it_stands()
        arms = {}
        for name, arm in started.items():
            arms[name] = arm.measured()
            arguments.out.write_text(json.dumps({**_environment(arguments.folder), **compared(arms)}, indent=1) + "\n")
    return 1 if any(arm["exit_code"] for arm in arms.values()) else 0


@dataclass(frozen=True)
class Arm:
    """A process of `engine_arm.py` and the file of its rows, which exists once its engine stands."""

    process: subprocess.Popen[str]
    out: Path

    @classmethod
    def start(cls, name: str, scratch: Path, options: list[str]) -> Arm:
        """Starts an arm on its folder in `scratch`. options: of its command line."""
        out, folder = scratch / f"{name}.json", scratch / ("isojax" if name in OURS else "stock")
        command = [sys.executable, str(Path(__file__).with_name("engine_arm.py")), name, str(folder), *options]
        return cls(subprocess.Popen([*command, "--out", str(out)], stdin=subprocess.PIPE, text=True), out)

    def wait_until_it_stands(self) -> None:
        """Returns once the engine has started, or its process has ended."""
        while self.process.poll() is None and not self.out.exists():
            time.sleep(0.2)

    def measured(self) -> dict[str, Any]:
        """Lets it measure; what it measured before it failed is kept, and said to be all."""
        self.process.communicate("measure\n")
        rows = json.loads(self.out.read_text()) if self.out.exists() else []
        return {"exit_code": self.process.returncode, "rows": rows}


def write_folders(folder: Path, weights: Path | None, scratch: Path) -> None:
    """The same weights twice: an ordinary checkpoint, and the sealed policy with its files linked."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from engine_parity import Options
    from engine_parity_bench import Bench
    from engine_parity_stock import write_checkpoint

    bench = Bench.open(folder, Options(weights=weights))
    write_checkpoint(scratch / "stock", bench.policy, bench.params)
    sealed = scratch / "isojax"
    sealed.mkdir()
    for path in [*folder.iterdir(), *(scratch / "stock").glob("*.safetensors*")]:
        if not (sealed / path.name).exists():
            (sealed / path.name).symlink_to(path.resolve())


def _environment(folder: Path) -> dict[str, str]:
    from timing import environment

    return {**environment(), "policy": folder.name}


def compared(arms: dict[str, Any]) -> dict[str, Any]:
    """The arms, and of each one's workloads the ratios to stock vLLM, where both measured the same."""
    stock = {_name(row): row for row in arms[BASELINE]["rows"]}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for arm, found in arms.items():
        for row in found["rows"]:
            baseline = stock.get(_name(row))
            if arm != BASELINE and baseline is not None:
                shared = [name for name in ("seconds", "device_ms_a_step") if name in row and name in baseline]
                ratios.setdefault(arm, {})[_name(row)] = {name: row[name] / baseline[name] for name in shared}
    return {"ratios_to_stock": ratios, "arms": arms}


def _name(row: dict[str, Any]) -> str:
    return f"{row['batch']}x{row['prompt']}x{row['output']}"


if __name__ == "__main__":
    sys.exit(main())
