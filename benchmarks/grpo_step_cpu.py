"""Seconds a GRPO step takes on this CPU: SmolLM2-135M on the demo's task, real vLLM rollouts, every bit checked.

    python benchmarks/grpo_step_cpu.py

Writes benchmarks/results/grpo_step_cpu.json. The first step compiles the trainer and the engine and is given apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cpu_environment import environment

from isojax.rl.assemble import assemble
from isojax.rl.config_file import load_config
from isojax.rl.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results" / "grpo_step_cpu.json"
CONFIG = Path(__file__).parents[1] / "examples" / "smollm2_arithmetic.toml"
PARTS = ("seconds_rollout", "seconds_check", "seconds_train", "seconds_sync")
COUNTS = ("tokens", "mismatch_tokens", "full_rows", "full_row_mismatches")


def main() -> None:
    """Parses the command line, trains and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="steps to train, the first of which compiles")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as scratch:
        lines = train(Path(scratch), arguments.steps)
    results = summary(lines)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results["later_steps"], indent=2), f"\nwritten to {arguments.out}")


def train(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The metrics' lines of a run."""
    config = load_config(CONFIG)
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    run = RunFolder(folder)
    trainer = assemble(config, config_folder=CONFIG.parent, folder=run)
    try:
        trainer.run()
    finally:
        trainer.close()
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread of the steps after the first."""
    config = load_config(CONFIG)
    rows = [
        {"seconds_step": round(sum(line[part] for part in PARTS), 2)}
        | {part: round(line[part], 2) for part in PARTS}
        | {count: line[count] for count in COUNTS}
        for line in lines
    ]
    return environment() | {
        "what": f"SmolLM2-135M bf16, {config.rollout.prompts_per_step} prompts x {config.rollout.group_size} samples, "
        f"at most {config.rollout.max_tokens} tokens each, checks and the KL term's reference included",
        "first_step": rows[0],
        "later_steps": {
            name: {
                "median": statistics.median(row[name] for row in rows[1:]),
                "least": min(row[name] for row in rows[1:]),
                "most": max(row[name] for row in rows[1:]),
            }
            for name in ("seconds_step", *PARTS)
        },
        "steps": rows,
    }


if __name__ == "__main__":
    main()
