"""Whole GRPO steps on one device, part by part, in both arms: python benchmarks/grpo_step.py OUT.json.

    python benchmarks/grpo_step.py OUT.json --shapes qwen3_1b7                      # both arms, one after the other
    python benchmarks/grpo_step.py OUT.json --shapes qwen3_8b --layers 16 --arm exact
    python benchmarks/grpo_step.py OUT.json --shapes small --prompts 2 --group 2 --prompt 8 --tokens 8   # on a CPU

A step is `isojax.rl`'s own: rollout, comparison with the trainer's forward, update, sync, one after the other. Weights
are random and nothing stops a completion, so each has `--tokens` tokens and both arms have equal work; prompts and
completions fill the native arm's rows and the exact arm's micro-batches alike where their sum is a multiple of 64.
Every arm runs in a process of its own, which alone holds the device. What is measured is written at once, and a call
for one arm leaves the other's numbers in OUT.json where they are, so arms can be measured in calls of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from arguments import at_least
from engine_parity_policies import SHAPES
from grpo_step_results import ARMS, Results

from isojax.policy.dense import REMATS

ENVIRONMENT = {
    # The trainer and the engine share the card: JAX must not take all of it first.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


def parser() -> argparse.ArgumentParser:
    """The command line of the benchmark, which each arm's process is given again."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("out", type=Path)
    found.add_argument("--shapes", default="qwen3_1b7", choices=sorted(SHAPES))
    found.add_argument("--layers", type=at_least(1), help="fewer layers than the shapes have")
    found.add_argument("--arm", action="append", choices=ARMS, help="this one alone; may be given twice")
    found.add_argument("--prompts", type=at_least(1), default=16, help="a step")
    found.add_argument("--group", type=at_least(2), default=8, help="completions of a prompt")
    found.add_argument("--prompt", type=at_least(1), default=128, help="tokens of a prompt")
    found.add_argument("--tokens", type=at_least(1), default=512, help="of a completion")
    found.add_argument("--sequences", type=at_least(1), default=16, help="completions in one micro-batch")
    found.add_argument("--step-tokens", type=at_least(1), default=2048, help="most tokens of an engine's step")
    found.add_argument("--remat", default="layer", choices=REMATS)
    found.add_argument("--full-rows", type=at_least(0), default=0, help="compared a step in the exact arm")
    found.add_argument("--reserve-gib", type=float, default=8.0, help="of the card, for activations and graphs")
    found.add_argument("--warm-up", type=at_least(0), default=2, help="steps that are not counted; the first compiles")
    found.add_argument("--steps", type=at_least(1), default=5, help="steps that are counted")
    found.add_argument("--syncs", type=at_least(1), default=10, help="syncs that are timed alone, after the steps")
    found.add_argument("--seconds", type=float, default=3000.0, help="after which an arm is ended")
    return found


def workload(options: argparse.Namespace) -> dict[str, Any]:
    """What both arms must have alike to be compared, as plain values."""
    names = ("shapes", "layers", "prompts", "group", "prompt", "tokens", "sequences", "step_tokens", "remat")
    return {name: getattr(options, name) for name in names}


def main(arguments: list[str] | None = None) -> int:
    """Runs the arms; returns the exit code, 1 where one failed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    results = Results(options.out)
    arms = tuple(dict.fromkeys(options.arm or ARMS))
    results.start(workload(options), "python benchmarks/grpo_step.py " + " ".join(arguments), arms)
    failed = False
    for arm in arms:
        print(f"{arm} arm", flush=True)
        command = [sys.executable, str(Path(__file__).with_name("grpo_step_arm.py")), arm, *arguments]
        try:
            done = subprocess.run(command, env=ENVIRONMENT | os.environ, timeout=options.seconds)
            problem = None if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not finished within {options.seconds:.0f} s"
        if problem:
            failed = True
            print(f"{arm} arm: {problem}", flush=True)
            results.record_failure(arm, problem)
    print(json.dumps(results.read().get("exact_over_native", {}), indent=1), f"\nwritten to {options.out}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
