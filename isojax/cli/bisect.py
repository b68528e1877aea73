"""`isojax bisect`: the first region, layer and row where two executions of one forward part."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from contracts.errors import BadConfig
from isojax.evidence.bisect import find_parting, load_outputs, save_outputs
from isojax.evidence.capture import RegionOutput
from isojax.evidence.executors import executor_names, open_executor
from isojax.policy.batch import pack
from isojax.weights.load import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Run an exported policy's forward twice, or compare saved runs, and name the first region, layer and row whose "
        "bits differ: the cause, not the largest difference."
    )
    parser.add_argument("policy", type=Path, metavar="POLICY", help="a policy folder (or a .gguf file)")
    parser.add_argument(
        "--left", default="trainer", metavar="EXECUTOR", help="an executor or a saved run (default: trainer)"
    )
    parser.add_argument(
        "--right", default="regions", metavar="EXECUTOR", help="an executor or a saved run (default: regions)"
    )
    parser.add_argument("--tokens", metavar="1,2,3", help="the sequence to run (default: 32 tokens drawn with seed 0)")
    parser.add_argument("--save", type=Path, metavar="FILE.npz", help="write the left run there and compare nothing")
    parser.epilog = f"Executors here: {', '.join(executor_names())}."


def run(arguments: argparse.Namespace) -> int:
    """Bisect; 0 if every bit agrees, 1 and the place if not."""
    policy, params = load(arguments.policy)
    tokens = _tokens(arguments.tokens, policy.config.vocab_size)
    batch = pack([tokens], max_position=policy.config.max_position, vocab_size=policy.config.vocab_size)

    def outputs(name: str) -> list[RegionOutput]:
        if name.endswith(".npz"):
            return load_outputs(Path(name), tokens)
        return open_executor(name)(arguments.policy, policy, params, batch)

    left = outputs(arguments.left)
    if arguments.save is not None:
        save_outputs(arguments.save, left, tokens)
        print(f"{arguments.save}: {len(left)} region calls on {len(tokens)} tokens")
        return 0
    found = find_parting(left, outputs(arguments.right))
    if found is None:
        sides = f"{arguments.left} and {arguments.right}"
        print(f"every bit agrees: {len(left)} region calls on {len(tokens)} tokens, {sides}")
        return 0
    print(found)
    return 1


def _tokens(text: str | None, vocab_size: int) -> list[int]:
    if text is None:
        return np.random.default_rng(0).integers(vocab_size, size=32).tolist()
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadConfig(
            field="--tokens", found=text, allowed="token ids with commas between", reason="It is not a list of numbers."
        ) from None
