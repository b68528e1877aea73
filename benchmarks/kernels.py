"""Every kernel beside its baseline on one card: python benchmarks/kernels.py FOLDER [--only matmul].

Runs the benchmarks of the kernels one after the other, each in a process of its own, and writes their result files into
FOLDER under the names that `benchmarks/performance.py` reads. The baselines of attention and energy need vLLM.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TOKENS = "8,16,32,64,128,256,512,1024,2048,4096,8192,16384"
#: What an engine on Qwen3's shapes has by default.
CACHE = ("--page", "16", "--requests", "256", "--context", "8704")
#: Result file, script and its options, by the kernels' name.
RUNS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "matmul": (
        ("matmul_turns_h200.json", "matmul.py", ("--tokens", TOKENS, "--leaves", "1,2,4,8", "--chosen")),
        ("matmul_tiles_h200.json", "matmul.py", ("--tokens", "128,256,512,1024,8192", "--leaves", "1,4")),
    ),
    "attention": (
        ("attention_decode_h200.json", "attention.py", (*CACHE, "--rows", "decode", "--decode-lengths", "346", "640")),
        ("attention_prefill_h200.json", "attention.py", (*CACHE, "--rows", "prefill")),
    ),
    "energy": (("energy_h200.json", "energy.py", ()),),
    "rows": (("rows_h200.json", "rows.py", ()),),
    "layer": (("layer_h200.json", "layer.py", ("--tokens", "8,256", "--length", "346", "--context", "8704")),),
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code, 1 where a benchmark failed; the others run all the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", choices=RUNS, help="these kernels alone; may be given twice")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = [
        result
        for name in options.only or RUNS
        for result, script, parameters in RUNS[name]
        if _run(script, options.folder / result, parameters)
    ]
    print(f"failed: {', '.join(failed)}" if failed else f"all in {options.folder}")
    return 1 if failed else 0


def _run(script: str, result: Path, parameters: tuple[str, ...]) -> int:
    print(f"{script} {' '.join(parameters)}", flush=True)
    command = [sys.executable, str(Path(__file__).with_name(script)), str(result), *parameters]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
