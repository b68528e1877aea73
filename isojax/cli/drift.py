"""`isojax drift`: how far two stacks' log-probabilities of the same tokens are apart."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from contracts import FILE_NAME, bits_float, handshake, load_contract
from contracts.errors import BadConfig
from isojax.evidence.drift import LogProbs, load_log_probs, measure, sample, save_log_probs, score_like
from isojax.rl.rollout import open_engine
from isojax.weights.load import load

_PROMPTS, _PROMPT_TOKENS = 4, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Compare log-probabilities of the same tokens. Each side is a JSONL dump, `ENGINE:POLICY` (A only: that engine "
        "samples), or `trainer:POLICY` (B only: the trainer scores what A sampled, at its contract's temperature)."
    )
    parser.add_argument("a", metavar="A", help="dump.jsonl or ENGINE:POLICY, for example vllm:runs/NAME/policy")
    parser.add_argument("b", metavar="B", nargs="?", help="dump.jsonl or trainer:POLICY; left out with --save")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens that an engine samples a prompt")
    parser.add_argument("--save", type=Path, metavar="FILE.jsonl", help="also write A's values there")


def run(arguments: argparse.Namespace) -> int:
    """Measure; 0 if every bit agrees, 1 if one does not."""
    if arguments.b is None and arguments.save is None:
        raise BadConfig(
            field="B", found="nothing", allowed="a dump or trainer:POLICY", reason="Two sides are compared."
        )
    left = _left(arguments.a, arguments.tokens)
    if arguments.save is not None:
        save_log_probs(arguments.save, left)
    if arguments.b is None:
        return 0
    name, separator, folder = arguments.b.partition(":")
    if separator and name == "trainer":
        policy, params = load(folder)
        right = score_like(left, policy, params, temperature=_temperature(Path(folder)))
    else:
        right = load_log_probs(Path(arguments.b))
    drift = measure(left, right)
    print(drift)
    return 1 if drift.different else 0


def _temperature(folder: Path) -> float:
    """The contract's T; 1 for weights without a contract."""
    if not (folder / FILE_NAME).exists():
        return 1.0
    return bits_float(load_contract(folder).semantics.temperature)


def _left(source: str, tokens: int) -> LogProbs:
    name, separator, folder = source.partition(":")
    if not separator or Path(source).exists():
        return load_log_probs(Path(source))
    policy, params = load(folder)
    engine = open_engine(name, folder)
    try:
        handshake(load_contract(folder), engine.report())
        engine.sync(params)
        prompts = np.random.default_rng(0).integers(policy.config.vocab_size, size=(_PROMPTS, _PROMPT_TOKENS)).tolist()
        return sample(engine, prompts, tokens, seed=0)
    finally:
        engine.close()
