"""What a caller asks of the engine, checked before anything of it reaches vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from contracts import ExecutionContract, bits_float, token_ids
from contracts.errors import EmptyBatch, PromptTooLong, UnsupportedRequest
from isojax.rl.rollout import Sampling


def checked_ids(prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int, longest: int) -> list[list[int]]:
    """The prompts as plain integers, after refusing what an engine of this vocabulary cannot run.

    longest: tokens of a prompt. Raises EmptyBatch, PromptTooLong and UnsupportedRequest.
    """
    if not len(prompts) or any(not len(prompt) for prompt in prompts):
        raise EmptyBatch(
            field="prompts",
            found=[len(prompt) for prompt in prompts],
            allowed="at least one prompt, each of at least one token",
            reason="There is nothing to continue.",
        )
    for index, prompt in enumerate(prompts):
        if len(prompt) > longest:
            raise PromptTooLong(
                field=f"prompts[{index}]",
                found=f"{len(prompt)} tokens",
                allowed=f"at most {longest} tokens",
                reason="The context must also hold the first sampled token.",
            )

    def checked(values: Sequence[int], field: str) -> list[int]:
        return list(token_ids(values, field=field, vocab_size=vocab_size, refusal=UnsupportedRequest))

    checked(sampling.stop_token_ids, "stop_token_ids")
    return [checked(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def require_temperature(sampling: Sampling, contract: ExecutionContract) -> None:
    """Raises UnsupportedRequest for sampling at another temperature than the contract's one."""
    wanted = bits_float(contract.semantics.temperature)
    # The region divides by an fp32 number, so 0.6 means the fp32 number nearest to it.
    if not sampling.greedy and np.float32(sampling.temperature) != np.float32(wanted):
        raise UnsupportedRequest(
            field="temperature",
            found=sampling.temperature,
            allowed=f"{wanted}, the contract's (or greedy)",
            reason="The engine's log-probabilities are log_softmax(logits / T) at that T; export the policy with "
            "another one.",
        )
