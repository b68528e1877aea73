"""vLLM with isojax's kernels against stock vLLM on one card: seconds, tokens a second, device time a decode step.

    python benchmarks/engine.py FOLDER --workload 1x128x512 --workload 32x128x512 --workload 256x128x512 --out FILE

FOLDER is a policy with sealed kernels, with or without weights, as `engine_parity.py --prepare` writes it. Every arm
runs on the same weights in a process of its own: stock vLLM, its own batch-invariant mode, ours as a rollout uses it,
and ours asked as stock vLLM is. They start together, since starting takes longer than measuring, and then take turns,
workload by workload and repeat by repeat, while the others do nothing: a machine that is slower for a while is slower
for all. A ratio below 1 is faster than stock vLLM.

A card at its power limit computes faster behind a pause, and an engine that waits for its host pauses. With --paced
ours also runs at stock vLLM's pace: its steps start no sooner after each other than stock's do, so that times on the
card are compared over equal steps.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from arguments import at_least
from engine_arm import ENVIRONMENTS, OURS, Workload

from isojax.rl.files import write_atomically

BASELINE = "stock"
ARMS = ("batch_invariant", "isojax")
WORKLOADS = ("1x128x512", "32x128x512", "256x128x512")
BESIDE = "isojax_beside"
PACED = "isojax_paced"
#: What each arm runs on, below one folder.
FOLDERS = {name: "isojax" if name in OURS else "stock" for name in ENVIRONMENTS} | {BESIDE: "beside"}
COMPARED = ("seconds", "device_ms_a_step")
SECONDS_BETWEEN_LOOKS = 0.02
LONGEST_TURN = 900
"""Seconds, a start included."""


def main() -> int:
    """Parses the command line; returns the exit code, 1 where an arm failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", action="append", help="BATCHxINxOUT, in requests and tokens")
    parser.add_argument("--arm", action="append", choices=ENVIRONMENTS, help="only this one beside stock")
    parser.add_argument(
        "--beside", type=Path, help="one arm more: the same policy's other sealed kernels, as a rollout"
    )
    parser.add_argument("--paced", action="store_true", help="one arm more: ours at stock vLLM's pace")
    parser.add_argument("--weights", type=Path, help="a .gguf file or checkpoint; else the folder's, or random ones")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    arguments = parser.parse_args()
    if arguments.paced and "isojax" not in (arguments.arm or ARMS):
        parser.error("--paced needs the arm isojax")
    workloads = [str(text) for text in arguments.workload or WORKLOADS]
    for text in workloads:
        Workload.parse(text)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        # In a process of its own, whose memory on the card is given back.
        folders = [folder for folder in (arguments.folder, arguments.beside) if folder is not None]
        writer = multiprocessing.get_context("spawn").Process(
            target=write_folders, args=(folders, arguments.weights, Path(scratch))
        )
        writer.start()
        writer.join()
        if writer.exitcode:
            return 1
        names = dict.fromkeys((BASELINE, *(arguments.arm or ARMS)))
        started = {name: Arm.start(name, Path(scratch), workloads) for name in names}
        if arguments.beside is not None:
            started[BESIDE] = Arm.start(BESIDE, Path(scratch), workloads)
        if arguments.paced:
            started[PACED] = replace(started["isojax"], pace=started[BASELINE])
        for arm in started.values():
            arm.wait_until_it_stands()
        head = {**_environment(arguments.folder), **({"beside": arguments.beside.name} if arguments.beside else {})}
        for arms in measured(started, workloads, arguments.repeats):
            write_atomically(arguments.out, json.dumps({**head, **compared(arms)}, indent=1) + "\n")
    return 1 if any(arm["exit_code"] for arm in arms.values()) else 0


def measured(arms: Mapping[str, Arm], workloads: Sequence[str], repeats: int) -> Iterator[dict[str, Any]]:
    """What all arms have measured so far, after every round of turns; once more when all have ended."""
    for repeat in range(repeats):
        for workload in workloads:
            # There and back, so that none is always the one that finds the card warm.
            for name in reversed(arms) if repeat % 2 else arms:
                arms[name].run(workload)
            yield {name: arm.found() for name, arm in arms.items()}
    for arm in arms.values():
        arm.close()
    yield {name: arm.found() for name, arm in arms.items()}


@dataclass(frozen=True)
class Arm:
    """A process of `engine_arm.py` and the file that it writes, which exists once its engine stands.

    pace: the arm whose steps its own keep pace with. Such an arm shares its process and file with one that doesn't.
    """

    process: subprocess.Popen[str]
    out: Path
    pace: Arm | None = None

    @classmethod
    def start(cls, name: str, scratch: Path, workloads: Sequence[str]) -> Arm:
        """Starts an arm on its folder in `scratch`."""
        out, folder = scratch / f"{name}.json", scratch / FOLDERS[name]
        kind = "isojax" if name == BESIDE else name
        options = [part for text in workloads for part in ("--workload", text)]
        command = [sys.executable, str(Path(__file__).with_name("engine_arm.py")), kind, str(folder), *options]
        return cls(subprocess.Popen([*command, "--out", str(out)], stdin=subprocess.PIPE, text=True), out)

    def wait_until_it_stands(self) -> None:
        """Returns once the engine has started, or its process has ended."""
        self._wait(0)

    def run(self, workload: str) -> None:
        """Has it run the workload once more, and returns when it has, or has ended."""
        wanted = self._content()["served"] + 1
        pace = "" if self.pace is None else self.pace.seconds_between_steps(workload)
        if pace is None:
            return
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{workload} {pace}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return
        self._wait(wanted)
        for row in self._rows():
            if _name(row) == workload:
                print(self.out.stem, row, flush=True)

    def seconds_between_steps(self, workload: str) -> float | None:
        """From one step's start to the next one's, of the workload's runs so far; None before any."""
        return next((row.get("seconds_between_steps") for row in self._rows() if _name(row) == workload), None)

    def close(self) -> None:
        """Has it end."""
        try:
            self.process.communicate(timeout=LONGEST_TURN)
        except subprocess.TimeoutExpired:
            self._end()

    def found(self) -> dict[str, Any]:
        """Its rows; what it measured before it failed is kept. exit_code: None while it runs."""
        return {"exit_code": self.process.poll(), "rows": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return [row for row in self._content()["rows"] if ("seconds_apart" in row) == (self.pace is not None)]

    def _wait(self, served: int) -> None:
        end = time.monotonic() + LONGEST_TURN
        while self.process.poll() is None and not (self.out.exists() and self._content()["served"] >= served):
            if time.monotonic() > end:
                self._end()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _end(self) -> None:
        print(f"{self.out.stem}: nothing for {LONGEST_TURN} s; it is ended", flush=True)
        self.process.kill()
        self.process.wait()

    def _content(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"served": 0, "rows": []}
        return json.loads(self.out.read_text()) if self.out.exists() else nothing


def write_folders(folders: Sequence[Path], weights: Path | None, scratch: Path) -> None:
    """The same weights as an ordinary checkpoint, and in each sealed policy of `folders` with its files linked."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from engine_parity import Options
    from engine_parity_bench import Bench
    from engine_parity_stock import write_checkpoint

    bench = Bench.open(folders[0], Options(weights=weights))
    write_checkpoint(scratch / FOLDERS[BASELINE], bench.policy, bench.params)
    for folder, arm in zip(folders, ("isojax", BESIDE), strict=False):
        sealed = scratch / FOLDERS[arm]
        sealed.mkdir()
        for path in [*folder.iterdir(), *(scratch / FOLDERS[BASELINE]).glob("*.safetensors*")]:
            if not (sealed / path.name).exists():
                (sealed / path.name).symlink_to(path.resolve())


def _environment(folder: Path) -> dict[str, str]:
    from timing import environment

    return {**environment(), "vllm": version("vllm"), "policy": folder.name}


def compared(arms: dict[str, Any]) -> dict[str, Any]:
    """The arms, and of each one's workloads the ratios to stock vLLM, where both ran the same as often."""
    stock = {_name(row): row for row in arms[BASELINE]["rows"]}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for arm, found in arms.items():
        for row in found["rows"]:
            baseline = stock.get(_name(row))
            # An arm that died half-way has other runs behind its median.
            if arm != BASELINE and baseline is not None and row["runs"] == baseline["runs"]:
                shared = [name for name in COMPARED if name in row and name in baseline]
                ratios.setdefault(arm, {})[_name(row)] = {name: row[name] / baseline[name] for name in shared}
    return {"ratios_to_stock": ratios, "arms": arms}


def _name(row: dict[str, Any]) -> str:
    return f"{row['batch']}x{row['prompt']}x{row['output']}"


if __name__ == "__main__":
    sys.exit(main())
