"""Checks what an engine returned before anything is learned from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts.errors import DifferenceFound, WeightDigestMismatch
from isojax.policy.policy import Policy
from isojax.rl.finite import require_finite
from isojax.rl.mismatch import Mismatch, compare_row, compare_tokens
from isojax.rl.optimizer import Parameters
from isojax.rl.packing import cut
from isojax.rl.rollout import Completion


def require_answers(
    completions: Sequence[Completion], prompts: Sequence[Sequence[int]], samples: int, weight_digest: str
) -> None:
    """What came back must be what was asked: every prompt's own tokens, `samples` times, under the synced weights.

    Raises DifferenceFound (another history, or log-probabilities that are not one a token), WeightDigestMismatch.
    """
    expected = [(index, tuple(prompt)) for index, prompt in enumerate(prompts) for _ in range(samples)]
    found = [(completion.prompt_index, completion.prompt_tokens) for completion in completions]
    if found != expected:
        wrong = next(
            (place for place, (left, right) in enumerate(zip(found, expected, strict=False)) if left != right),
            min(len(found), len(expected)),
        )
        raise DifferenceFound(
            field=f"completion {wrong}",
            found=found[wrong] if wrong < len(found) else f"{len(found)} completions",
            allowed=expected[wrong] if wrong < len(expected) else f"{len(expected)} completions",
            reason="The engine must return the tokens that it was given: token in, token out.",
        )
    for index, completion in enumerate(completions):
        if completion.weight_digest != weight_digest:
            raise WeightDigestMismatch(
                field=f"completion {index}, weight digest",
                found=completion.weight_digest,
                allowed=weight_digest,
                reason="It was sampled from other weights than those last synced.",
            )
        if len(completion.tokens) == 0 or completion.log_probs.shape != (len(completion.tokens),):
            raise DifferenceFound(
                field=f"completion {index}",
                found=f"{len(completion.tokens)} tokens, log-probabilities of shape {completion.log_probs.shape}",
                allowed="one float32 log-probability for each of 1 or more tokens",
                reason="The engine left some out.",
            )


def score(
    policy: Policy, params: Parameters, completions: Sequence[Completion], temperature: float, capacity: int
) -> list[np.ndarray]:
    """trainer_score log-probabilities of every completion's tokens: one float32 [len(tokens)] array each.

    capacity: most tokens in a packed batch. Raises NonFiniteLogits.
    """
    found: list[np.ndarray] = [np.empty(0, np.float32)] * len(completions)
    for micro in cut(completions, range(len(completions)), capacity, policy.packing):
        micro.gather(np.asarray(policy.log_probs(params, micro.batch, temperature)), found)
    for index, values in enumerate(found):
        require_finite("trainer_score", values, index, completions[index], policy, params)
    return found


def check_rows(
    policy: Policy, params: Parameters, completions: Sequence[Completion], temperature: float, capacity: int
) -> Mismatch:
    """Every full row that the engine returned, against trainer_score, bit for bit over the vocabulary.

    Raises NonFiniteLogits if an engine's row is not finite.
    """
    total = Mismatch()
    wanted = [index for index, completion in enumerate(completions) if completion.rows]
    for micro in cut(completions, wanted, capacity, policy.packing):
        chosen, places = [], []
        for index, rows in zip(micro.completions, micro.rows, strict=True):
            for place, engine_row in sorted((completions[index].rows or {}).items()):
                if not np.isfinite(engine_row).all():
                    spoiled = np.where(np.arange(place + 1) == place, np.float32(np.nan), np.float32(0))
                    require_finite("engine", spoiled, index, completions[index], policy, params)
                chosen.append(rows[place])
                places.append((index, place))
        # No more at once than there are kernels for.
        most = policy.row_buckets[-1] if policy.row_buckets else len(chosen)
        for start in range(0, len(chosen), most):
            part = slice(start, start + most)
            trainer_rows = np.asarray(policy.log_prob_rows(params, micro.batch, np.array(chosen[part]), temperature))
            for (index, place), trainer_row in zip(places[part], trainer_rows, strict=True):
                total = total.joined(compare_row(index, place, (completions[index].rows or {})[place], trainer_row))
    return total


def check_rollout(
    policy: Policy, params: Parameters, completions: Sequence[Completion], temperature: float, capacity: int
) -> Mismatch:
    """The engine's sampled tokens and full rows against trainer_score. Raises NonFiniteLogits."""
    for index, completion in enumerate(completions):
        require_finite("engine", completion.log_probs, index, completion, policy, params)
    scored = score(policy, params, completions, temperature, capacity)
    rows = check_rows(policy, params, completions, temperature, capacity)
    return compare_tokens(completions, "trainer_score", scored).joined(rows)
