"""NaN and infinity: which request, at which position, and the first region that made one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from contracts.errors import NonFiniteLogits
from isojax.evidence.capture import capture_forward, first_non_finite
from isojax.policy.batch import pack
from isojax.policy.policy import Policy
from isojax.rl.optimizer import Parameters
from isojax.rl.rollout import Completion


def require_finite(
    side: str, values: np.ndarray, index: int, completion: Completion, policy: Policy, params: Parameters
) -> None:
    """Raise NonFiniteLogits, naming request, position and region, if a log-probability of a completion is not finite.

    side: whose values these are, "engine" or a trainer's case. values: float32, one a sampled token. index: of the
    completion in the rollout. The region is found by running the trainer's forward on that one sequence.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    if not bad.size:
        return
    place = int(bad[0])
    raise NonFiniteLogits(
        field=f"request {index} (prompt {completion.prompt_index}), position {len(completion.prompt_tokens) + place}, "
        f"region {_first_region(completion, place, policy, params)}",
        found=f"{float(values[place])} in the log-probabilities of {side}",
        allowed="finite values",
        reason="One NaN or infinite logit spoils its whole row, so nothing is learned from this rollout.",
    )


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """Inside, a NonFiniteLogits also says in which step of the run it was met."""
    try:
        yield
    except NonFiniteLogits as error:
        raise NonFiniteLogits(
            field=f"step {step}, {error.field}", found=error.found, allowed=error.allowed, reason=error.reason
        ) from error


def _first_region(completion: Completion, place: int, policy: Policy, params: Parameters) -> str:
    if policy.arm == "native":
        return "unknown (the native arm has none)"
    history = completion.prompt_tokens + completion.tokens[:place]
    whole = policy.placement.whole(params)
    found = first_non_finite(capture_forward(policy.on_one_device, whole, pack([history])), rows=len(history))
    # The trainer's own forward is finite: the value was spoiled behind the last region that both sides share.
    return str(found[0]) if found else "log_prob_rows, on the engine's side alone"
