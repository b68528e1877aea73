"""Which sampling requests the contract's semantics cover; every other one is refused by name, in Python and HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError

from contracts.errors import UnsupportedRequest

if TYPE_CHECKING:
    from vllm import SamplingParams

RENORMALISES = (
    "A filter renormalises the rollout's probabilities by the kept mass and leaves the trainer's alone, so both sides "
    "would hold different values for the same token."
)
CHANGES_LOGITS = (
    "It changes the distribution after the log-probabilities are taken, so they would be those of another one."
)
FORCES_TOKENS = "It masks or forces tokens, so what is sampled no longer follows the reported log-probabilities."


class RefusedRequest(UnsupportedRequest, VLLMValidationError):
    """A refused request: an isojax refusal to a Python caller, HTTP 400 with the same text to an OpenAI client."""

    # vLLM's HTTP layer reads these two; the text already names the field and the value.
    parameter: str | None = None
    value: object = None

    def __str__(self) -> str:
        """The four parts in one paragraph, without vLLM's suffix that repeats two of them."""
        return str(self.args[0])


def _empty(value: Any) -> bool:
    return not value


# (field of SamplingParams, whether its value leaves the policy's distribution as it is, what is allowed, why).
# Fields that another vLLM version lacks are absent from its requests and so need no check there.
_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("top_p", lambda value: value == 1.0, "1.0", RENORMALISES),
    ("top_k", lambda value: value in (0, -1), "0 or -1 (off)", RENORMALISES),
    ("min_p", lambda value: value == 0.0, "0.0", RENORMALISES),
    ("presence_penalty", lambda value: value == 0.0, "0.0", CHANGES_LOGITS),
    ("frequency_penalty", lambda value: value == 0.0, "0.0", CHANGES_LOGITS),
    ("repetition_penalty", lambda value: value == 1.0, "1.0", CHANGES_LOGITS),
    ("logit_bias", _empty, "none", CHANGES_LOGITS),
    ("bad_words", _empty, "none", FORCES_TOKENS),
    ("allowed_token_ids", lambda value: value is None, "none", FORCES_TOKENS),
    ("min_tokens", lambda value: value == 0, "0", FORCES_TOKENS),
    ("structured_outputs", lambda value: value is None, "none", FORCES_TOKENS),
    ("thinking_token_budget", lambda value: value is None, "none", FORCES_TOKENS),
    ("trace_decode_token_ids", _empty, "none", FORCES_TOKENS),
    ("watermarking", lambda value: not value, "off", CHANGES_LOGITS),
)


def check_sampling_params(params: SamplingParams) -> None:
    """Refuses vLLM sampling parameters under which the reported log-probability is not the policy's own.

    vLLM's temperature must be 1 (sample from the reported distribution, in which the contract's temperature already is)
    or 0 (greedy, for evaluation). Raises RefusedRequest, which is an UnsupportedRequest.
    """
    temperature = params.temperature
    if temperature not in (0.0, 1.0):
        raise RefusedRequest(
            field="temperature",
            found=temperature,
            allowed="1 (sample at the contract's temperature) or 0 (greedy)",
            reason="The log-probabilities that the engine reports are log_softmax(logits / T) at the contract's one "
            "temperature T; export the policy with another T instead.",
        )
    for field, covered, allowed, reason in _RULES:
        value = getattr(params, field, None)
        if value is not None and not covered(value):
            raise RefusedRequest(field=field, found=value, allowed=allowed, reason=reason)
