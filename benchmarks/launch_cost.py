"""Host microseconds of one kernel launch outside of a CUDA graph: python benchmarks/launch_cost.py OUT.json.

A torch op of a region against a torch.add, both queued without waiting for the card.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import write_results

from bridge.kernel_launchers import LAUNCHERS, compile_kernels
from bridge.torch_ops import op_of
from pallas_kernels.hopper_regions import seal_region
from pallas_kernels.region import REGIONS

CALLS, ROUNDS = 500, 9
T, H = 8, 1024


def main() -> None:
    """Times the Launcher alone, the whole op, and torch's own."""
    device = torch.device("cuda:0")
    residual_add = REGIONS["residual_add"]
    program = seal_region(residual_add, (((T, H), "bfloat16"),) * 2, {})
    compile_kernels([program], device)
    x, y = (torch.randn(T, H, device=device).bfloat16() for _ in range(2))
    op = op_of(residual_add)
    calls: dict[str, Callable[[], object]] = {
        "launcher": lambda: LAUNCHERS.launch("residual_add", (x, y), {}),
        "torch op of the region": lambda: op(x, y),
        "torch.add": lambda: torch.add(x, y),
    }
    rows: list[dict[str, Any]] = []
    for name, call in calls.items():
        rounds = [_host_microseconds(call) for _ in range(ROUNDS)]
        rows.append({"what": name, "host_us": statistics.median(rounds), "spread_us": max(rounds) - min(rounds)})
        print(rows[-1], flush=True)
    write_results(sys.argv[1], rows)


def _host_microseconds(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / CALLS * 1e6


if __name__ == "__main__":
    main()
