"""Which instruction set XLA:CPU compiles for here: part of the name of a CPU contract's architecture."""

import platform
from pathlib import Path

# The levels of the x86-64 psABI, highest first, by the flags that the kernel reports.
_X86_LEVELS = (
    ("x86_64_v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86_64_v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("x86_64_v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)


def cpu_arch() -> str:
    """`cpu-` and the instruction set of this machine, such as `cpu-x86_64_v4` or `cpu-aarch64`.

    XLA:CPU compiles for the machine it runs on, so wider vectors and fused multiply-adds may give other bits.
    """
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return f"cpu-{machine or 'unknown'}"
    flags = cpu_flags()
    return "cpu-" + next((level for level, needed in _X86_LEVELS if needed <= flags), "x86_64_v1")


def cpu_flags() -> set[str]:
    """CPU features as Linux names them; empty where it does not say."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines()
    named = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(named, "").split())
