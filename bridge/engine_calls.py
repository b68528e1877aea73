"""One call of the engine: its requests in vLLM, what the worker keeps while they run, and the first fault shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.completions import SampleRequest
from bridge.non_finite import Fault, fault_of_values
from contracts.errors import NonFiniteLogits

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

Ask = Callable[..., Any]
"""Calls a method of the worker, by name and with plain arguments, and gives what it returns."""


@contextmanager
def kept_by_worker(ask: Ask, full_rows: int, seed: int, *, separate_process: bool) -> Iterator[bool]:
    """While the block runs the worker keeps this many full rows and, if it can, what is sampled: gives whether.

    seed: which rows are kept where there are more.
    """
    ended = False
    try:
        # Both anew, whatever a call that failed has left.
        logged = ask("isojax_log_sampled", True)
        ask("isojax_tap_rows", full_rows, seed)
        yield logged
        ended = True
    finally:
        # Ctrl-C also reaches an engine in a process of its own, which ends and would never answer.
        if ended or not separate_process:
            ask("isojax_log_sampled", False)
            ask("isojax_tap_rows", 0, 0)


def run_requests(llm: LLM, tokens: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """What vLLM returns for prompts of these tokens, in order. After an error nothing stays in flight."""
    from vllm.inputs import TokensPrompt

    try:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tokens]
        return llm.generate(prompts, params, use_tqdm=False)
    except BaseException:
        # Also Ctrl-C: the next sync could not run.
        engine = llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise


def first_fault(
    ask: Ask, requests: Sequence[SampleRequest], values: Sequence[tuple[int, np.ndarray]]
) -> NonFiniteLogits | None:
    """The refusal of the first row that is not finite, under its request's name; None where all are.

    values: of every request the position of its first row, and its rows' log-probabilities.
    """
    faults = [Fault(**fields) for fields in ask("isojax_take_faults")]
    if not faults:
        # On a card the worker asks the device nothing, so what comes back has to tell.
        shown = [fault_of_values(str(requests[n]), n, *positioned) for n, positioned in enumerate(values)]
        faults = [fault for fault in shown if fault is not None]
    if not faults:
        return None
    first = min(faults, key=lambda fault: (fault.record or 0, fault.position))
    return first.error(None if first.record is None else str(requests[first.record]))
