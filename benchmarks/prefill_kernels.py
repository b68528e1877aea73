"""What the card runs while an engine computes prompts: every kernel by name, launches and microseconds, busy and idle.

    python benchmarks/prefill_kernels.py ARM FOLDER --out FILE     # one of engine_arm.py's arms, and its folder

`engine.write_folders` makes the folders that stock vLLM and ours run on the same weights. A kernel's time is what it
adds, as in `step_kernels.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_arm import ENVIRONMENTS, Workload, _seconds, _started
from step_kernels import added, ran_on_card

RUNS = 3


def main() -> None:
    """Parses the command line and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=ENVIRONMENTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", type=Workload.parse, default=Workload(8, 8192, 1), help="BATCHxINxOUT")
    parser.add_argument("--out", type=Path, default=Path("prefill_kernels.json"))
    arguments = parser.parse_args()
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", **ENVIRONMENTS[arguments.arm]}
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with _started(arguments.arm, arguments.folder, [arguments.workload]) as generate:
        from timing import environment

        _seconds(generate, arguments.workload, 0)
        seconds = [_seconds(generate, arguments.workload, 1 + number) for number in range(RUNS)]
        ran = ran_on_card(lambda: _seconds(generate, arguments.workload, 1 + RUNS))
    found = {"arm": arguments.arm, **arguments.workload._asdict(), "seconds": seconds, **summary(ran)}
    arguments.out.write_text(json.dumps({**environment(), **found}, indent=1) + "\n")
    for row in found["kernels"]:
        print(f"{row['launches']:8} {row['us']:12.1f} us  {row['kernel'][:100]}")


def summary(ran: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """Microseconds from the first start to the last end, of these idle, and by kernel, the longest first."""
    starts, ends, _ = zip(*sorted(ran), strict=True)
    busy_until = list(itertools.accumulate(ends, max))
    idle = sum(max(0.0, start - busy) for start, busy in zip(starts[1:], busy_until, strict=False))
    kernels = sorted(added(ran).items(), key=lambda item: -item[1][1])
    return {
        "span_us": busy_until[-1] - starts[0],
        "idle_us": idle,
        "kernels": [{"kernel": name, "launches": launches, "us": us} for name, (launches, us) in kernels],
    }


if __name__ == "__main__":
    main()
