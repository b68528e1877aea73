"""Times the norm and elementwise kernels against copy bandwidth: python benchmarks/rows.py OUT.json."""

import sys
from typing import Any

import torch
from timing import microseconds, write_results

from bridge.launcher import Compiler, Launcher
from pallas_kernels.program import Program
from pallas_kernels.qk_norm_rope.hopper import qk_norm_rope_program
from pallas_kernels.residual_add.hopper import residual_add_program
from pallas_kernels.rms_norm.hopper import add_rms_norm_program, rms_norm_program
from pallas_kernels.seal import seal_program
from pallas_kernels.swiglu.hopper import swiglu_program


def _programs(T: int) -> list[Program]:
    return [
        rms_norm_program(T, 4096, eps=1e-6),
        add_rms_norm_program(T, 4096, eps=1e-6),
        residual_add_program(T, 4096),
        swiglu_program(T, 12288),
        qk_norm_rope_program(T, 32, 8, 128, norm=True, eps=1e-6),
    ]


def copy_bandwidth() -> float:
    """TB/s of a copy, read and written bytes together. Its arrays are gone afterwards."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    # A kernel and not copy_: inside a graph that becomes a memcpy node, which the slower copy engine runs.
    copied, _ = microseconds([lambda: torch.neg(source, out=target)], repeats=3)
    return 2 * source.numel() * 2 / copied / 1e6


def main() -> None:
    compiler = Compiler(torch.device("cuda:0"))
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = [{"what": "copy (torch.neg)", "tb_per_s": bandwidth}]
    for T in (8, 256, 8192):
        for program in _programs(T):
            run = Launcher(seal_program("rows", "1", {}, program), compiler)
            sets = []
            for _ in range(3 if T > 256 else 1):
                sets.append(
                    [
                        torch.randn(program.buffers[n].shape, device="cuda").to(
                            getattr(torch, program.buffers[n].dtype)
                        )
                        for n in program.operands
                    ]
                )
            us, spread = microseconds([lambda run=run, inputs=inputs: run(*inputs) for inputs in sets])
            moved = sum(program.buffers[name].size for name in (*program.operands, *program.results))
            rate = moved / us / 1e6
            rows.append(
                {"what": program.steps[0].name, "T": T, "us": us, "spread_us": spread, "of_copy": rate / bandwidth}
            )
            print(rows[-1], flush=True)
    write_results(sys.argv[1], rows)


if __name__ == "__main__":
    main()
