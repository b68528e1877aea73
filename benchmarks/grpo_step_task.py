"""The task of `grpo_step.py`: prompts of random tokens, and a reward that differs between completions of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from isojax.rl.tasks import Example

SEED = 0
SMALLEST_TOKEN = 3
"""Smaller ids are a tokenizer's special ones, as a rule."""


def write_prompts(path: Path, count: int, length: int, vocabulary: int) -> None:
    """A JSONL file of `count` prompts of `length` random tokens, the same in every process."""
    tokens = np.random.default_rng(SEED).integers(SMALLEST_TOKEN, vocabulary, (count, length))
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in tokens.tolist()), encoding="utf-8")


def even_share(example: Example, tokens: tuple[int, ...], text: str) -> float:
    """The share of even tokens: groups differ in it, so that every step has a gradient."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
