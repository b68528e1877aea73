"""Where a decode step of the CPU engine goes: SmolLM2-135M, 8 sequences, milliseconds a step by part.

    python benchmarks/decode_profile_cpu.py

Writes benchmarks/results/decode_profile_cpu.json. The parts are timed by wrapping their calls, which adds a little.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_environment import environment
from engine_cpu import STEPS, export, generate_for, started

RESULTS = Path(__file__).parent / "results" / "decode_profile_cpu.json"


def main() -> None:
    """Runs the engine once plain and once with its parts timed."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    with tempfile.TemporaryDirectory() as scratch:
        generate = generate_for(started(export(Path(scratch))["isojax"]))
        for _ in range(2):
            generate()
        plain = _milliseconds(generate)
        parts = _timed_parts()
        whole = _milliseconds(generate)
    rows = {name: round(seconds * 1e3 / STEPS, 2) for name, seconds in sorted(parts.items(), key=lambda item: -item[1])}
    results = environment() | {"step_ms": plain, "step_ms_while_timed": whole, "parts_ms_a_step": rows}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def _milliseconds(generate: Callable[[], object]) -> float:
    start = time.perf_counter()
    generate()
    return round((time.perf_counter() - start) * 1e3 / STEPS, 1)


def _timed_parts() -> dict[str, float]:
    """From now on adds up the seconds of every merged segment, by the regions in it, and of attention."""
    from bridge.attention_backend import CachedAttention
    from bridge.translate.segments import Segment

    seconds: dict[str, float] = defaultdict(float)

    def wrap(owner: Any, label: Callable[[Any], str]) -> None:
        call = owner.forward

        def timed(self: Any, *arguments: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = call(self, *arguments, **keywords)
            seconds[label(self)] += time.perf_counter() - start
            return result

        owner.forward = timed

    wrap(Segment, lambda segment: ", ".join(segment.regions))
    wrap(CachedAttention, lambda _: "paged attention and cache write")
    return seconds


if __name__ == "__main__":
    main()
