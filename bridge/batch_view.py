"""Who owns the rows of a running step: which request, at which position, predicting which of its output tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

RECORD = "isojax_record"
"""Key of SamplingParams.extra_args that VllmEngine sets: the number by which it will ask about this request."""
NO_RECORD = -1
"""In arrays of such numbers, a request from elsewhere."""


@dataclass(frozen=True)
class RowOwner:
    """Owner of one row.

    request: vLLM's request id. position: of the token that the row was computed from, in its sequence. token_index: of
    the output token that the row is the distribution of; negative inside a prompt, where nothing is sampled. sampled:
    whether a token is drawn from this row (not so at the end of a prefill chunk). record: VllmEngine's own number for
    the request, None for requests from elsewhere.
    """

    request: str
    position: int
    token_index: int
    sampled: bool
    record: int | None


class BatchView:
    """Reads vLLM's V1 model runner, in whose input batch row i of a step's logits belongs to request i."""

    def __init__(self, runner: GPUModelRunner) -> None:
        """Keeps the runner; nothing is copied."""
        self._runner = runner

    def __len__(self) -> int:
        return self._runner.input_batch.num_reqs

    def owner(self, request_index: int, position: int) -> RowOwner:
        """The owner of a row of request `request_index` that was computed from the token at `position`."""
        request_id = self._runner.input_batch.req_ids[request_index]
        state: Any = self._runner.requests[request_id]
        record = (state.sampling_params.extra_args or {}).get(RECORD) if state.sampling_params else None
        return RowOwner(
            request=request_id,
            position=position,
            token_index=position + 1 - state.num_prompt_tokens,
            # A chunk that ends before the request's last known token: vLLM samples there and throws the token away.
            sampled=position + 1 >= state.num_tokens,
            record=record,
        )
