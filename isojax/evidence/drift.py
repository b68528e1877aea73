"""How far two sets of log-probabilities of the same tokens are apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from contracts import bits_float, token_ids
from contracts.errors import BadConfig, EmptyBatch
from contracts.user_files import read_json_lines
from isojax.policy.policy import Policy
from isojax.rl.check_rollout import score
from isojax.rl.mismatch import different_bits
from isojax.rl.rollout import Completion, RolloutEngine, Sampling


@dataclass(frozen=True)
class LogProbs:
    """Log-probabilities of some sequences' tokens.

    tokens: the scored tokens of each sequence. log_probs: float32, one a token. prompts: what came before them, where
    known; needed only to score the same tokens with another stack.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[np.ndarray, ...]
    prompts: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Drift:
    """Distances over all tokens; natural logarithms. `different` counts bit patterns, so exact means it is 0.

    mean_signed: mean of d = right - left. kl: k3 estimate of KL(left || right) a token, exp(d) - d - 1.
    ratio_low, ratio_high: extremes of exp(right - left), the importance ratio that an update would see.
    worst_sequence, worst_token: where max_abs is.
    """

    tokens: int
    different: int
    mean_abs: float
    max_abs: float
    mean_signed: float
    kl: float
    ratio_low: float
    ratio_high: float
    worst_sequence: int
    worst_token: int

    def __str__(self) -> str:
        share = 100.0 * self.different / self.tokens
        return "\n".join(
            (
                f"tokens             {self.tokens:,}",
                f"different bits     {self.different:,} ({share:.2f}%)",
                f"mean |difference|  {self.mean_abs:.3e}",
                f"max |difference|   {self.max_abs:.3e}  (sequence {self.worst_sequence}, token {self.worst_token})",
                f"mean difference    {self.mean_signed:+.3e}  (right - left)",
                f"KL(left || right)  {self.kl:.3e}  (k3, nats a token)",
                f"ratio              {self.ratio_low:.6f} to {self.ratio_high:.6f}",
            )
        )


def measure(left: LogProbs, right: LogProbs) -> Drift:
    """Compare two stacks' values of the same tokens. Raises BadConfig if the tokens differ, EmptyBatch without any."""
    for number, (ours, theirs) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        if ours != theirs:
            raise BadConfig(
                field=f"tokens of sequence {number}",
                found=theirs[:8],
                allowed=ours[:8],
                reason="The two sides scored different tokens, so their log-probabilities cannot be compared.",
            )
    if len(left.tokens) != len(right.tokens):
        raise BadConfig(
            field="sequences",
            found=len(right.tokens),
            allowed=len(left.tokens),
            reason="The two sides scored different numbers of sequences.",
        )
    if not any(left.tokens):
        raise EmptyBatch(field="tokens", found=0, allowed="1 or more", reason="There is nothing to compare.")
    one, other = np.concatenate(left.log_probs), np.concatenate(right.log_probs)
    signed = other.astype(np.float64) - one.astype(np.float64)
    worst = int(np.argmax(np.abs(signed)))
    starts = np.cumsum([0, *(len(tokens) for tokens in left.tokens)])
    sequence = int(np.searchsorted(starts, worst, side="right")) - 1
    return Drift(
        tokens=len(signed),
        different=int(different_bits(one, other).sum()),
        mean_abs=float(np.abs(signed).mean()),
        max_abs=float(np.abs(signed[worst])),
        mean_signed=float(signed.mean()),
        kl=float((np.exp(signed) - signed - 1.0).mean()),
        ratio_low=float(np.exp(signed.min())),
        ratio_high=float(np.exp(signed.max())),
        worst_sequence=sequence,
        worst_token=worst - int(starts[sequence]),
    )


def from_completions(completions: Sequence[Completion]) -> LogProbs:
    """What an engine reported of its own samples."""
    return LogProbs(
        tuple(completion.tokens for completion in completions),
        tuple(completion.log_probs for completion in completions),
        tuple(completion.prompt_tokens for completion in completions),
    )


def sample(engine: RolloutEngine, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> LogProbs:
    """Let an engine sample one completion of each prompt, at its contract's temperature, with log-probabilities."""
    temperature = bits_float(engine.contract.semantics.temperature)
    return from_completions(
        engine.generate(prompts, Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed))
    )


def score_like(
    other: LogProbs,
    policy: Policy,
    params: Mapping[str, jax.Array],
    *,
    temperature: float = 1.0,
    capacity: int = 1024,
) -> LogProbs:
    """The trainer's log-probabilities of the tokens that another stack scored, at that stack's temperature.

    Raises EmptyBatch for no sequences and BadConfig without their prompts.
    """
    if not other.tokens:
        raise EmptyBatch(field="sequences", found=0, allowed="1 or more", reason="There is nothing to score.")
    if other.prompts is None:
        raise BadConfig(
            field="prompts", found="none", allowed="one a sequence", reason="A token is scored after its whole history."
        )
    completions = [
        Completion(number, prompt, tokens, log_probs, "length", "")
        for number, (prompt, tokens, log_probs) in enumerate(
            zip(other.prompts, other.tokens, other.log_probs, strict=True)
        )
    ]
    longest = max(len(prompt) + len(tokens) for prompt, tokens in zip(other.prompts, other.tokens, strict=True))
    scored = score(policy, dict(params), completions, temperature, max(capacity, longest))
    return LogProbs(other.tokens, tuple(scored), other.prompts)


def save_log_probs(path: Path, log_probs: LogProbs) -> None:
    """Write JSON lines {"prompt", "tokens", "log_probs"}; nine digits bring every float32 back exactly."""
    lines = []
    for number, (tokens, values) in enumerate(zip(log_probs.tokens, log_probs.log_probs, strict=True)):
        line: dict[str, Any] = {"tokens": list(tokens), "log_probs": [float(f"{value:.9g}") for value in values]}
        if log_probs.prompts is not None:
            line["prompt"] = list(log_probs.prompts[number])
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_log_probs(path: Path) -> LogProbs:
    """Read what `save_log_probs` wrote, or anybody's file of that form. Raises BadConfig naming file and line."""
    read = [_read_line(values, where) for where, values in read_json_lines(path, refusal=BadConfig, field="dump")]
    prompts = tuple(prompt for _, _, prompt in read if prompt is not None)
    return LogProbs(
        tuple(tokens for tokens, _, _ in read),
        tuple(values for _, values, _ in read),
        prompts if len(prompts) == len(read) else None,
    )


def _read_line(values: dict[str, Any], where: str) -> tuple[tuple[int, ...], np.ndarray, tuple[int, ...] | None]:
    tokens = token_ids(values.get("tokens"), field=f"{where}, tokens")
    prompt = token_ids(values["prompt"], field=f"{where}, prompt") if "prompt" in values else None
    found = values.get("log_probs")
    if not isinstance(found, list) or [type(value) in (int, float) for value in found] != [True] * len(tokens):
        raise BadConfig(
            field=f"{where}, log_probs",
            found=str(found)[:80],
            allowed=f"{len(tokens)} numbers, one a token",
            reason='A line is {"tokens": [...], "log_probs": [...]} and maybe "prompt": [...].',
        )
    try:
        return tokens, np.array(found, np.float64).astype(np.float32), prompt
    except OverflowError as error:
        raise BadConfig(
            field=f"{where}, log_probs", found=str(error), allowed="numbers", reason="No float holds one of them."
        ) from error
