"""Between the rollout protocol and vLLM's requests: seeds and parameters in, tokens and exact log-probabilities out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.batch_view import RECORD
from isojax.rl.rollout import Completion, Sampling, TappedRows, request_seed

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample: its prompt's index, and its number among that prompt's samples."""

    prompt: int
    sample: int

    def __str__(self) -> str:
        """Its name in messages."""
        return f"prompt {self.prompt}, sample {self.sample}"

    def sampling_params(
        self, record: int, sampling: Sampling, *, temperature: float = 1.0, reported: bool = True
    ) -> SamplingParams:
        """vLLM's parameters for it. record: the number by which the engine will ask about it.

        temperature: vLLM's own. The contract's is inside the log-probabilities already, which leaves 1. reported:
        whether vLLM is to report the sampled tokens' values.
        """
        given = sampling.seed
        seed = secrets.randbits(62) if given is None else request_seed(given, self.prompt, self.sample)
        return sampling_params(
            record=record,
            max_tokens=sampling.max_tokens,
            temperature=0.0 if sampling.greedy else temperature,
            seed=None if sampling.greedy else seed,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0 if reported else None,
        )


def sampling_params(*, record: int, **fields: Any) -> SamplingParams:
    """Parameters of a request in tokens only: text never enters, and the stop rule is the caller's."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={RECORD: record},
        **fields,
    )


def completion_of(
    request: SampleRequest,
    output: RequestOutput,
    log_probs: np.ndarray,
    weights: str,
    rows: Mapping[int, np.ndarray] | None,
) -> Completion:
    """What vLLM returned for a request. log_probs: of its tokens, fp32."""
    sampled = output.outputs[0]
    tokens = tuple(sampled.token_ids)
    return Completion(
        prompt_index=request.prompt,
        prompt_tokens=tuple(output.prompt_token_ids or ()),
        tokens=tokens,
        log_probs=log_probs,
        finish_reason=str(sampled.finish_reason),
        weight_digest=weights,
        # A step that was scheduled ahead may have tapped a row behind the last token.
        rows=None if rows is None else {index: row for index, row in rows.items() if index < len(tokens)},
    )


def reported_values(output: RequestOutput) -> np.ndarray:
    """fp32 log-probability of each sampled token, as vLLM reports it: as Python floats, which hold it exactly."""
    sampled = output.outputs[0]
    entries = zip(sampled.token_ids, sampled.logprobs or (), strict=True)
    return np.array([entry[token].logprob for token, entry in entries if entry], np.float32)


def prompt_scores(sequence: Sequence[int], output: RequestOutput) -> np.ndarray:
    """fp32 log-probability of every token of a prompt but the first."""
    entries = zip(sequence[1:], (output.prompt_logprobs or [None])[1:], strict=True)
    return np.array([entry[int(token)].logprob for token, entry in entries if entry], np.float32)


def tapped_rows(taken: Mapping[str, Any], lengths: Sequence[int]) -> TappedRows:
    """What `RowTap.take_on_device` returned, over completions of these lengths."""
    owners = enumerate(zip(taken["records"], taken["token_indices"], strict=True))
    # A step that was scheduled ahead may have tapped a row behind the last token: it is left out.
    kept = [(slot, record, index) for slot, (record, index) in owners if index < lengths[record]]
    return TappedRows(
        rows=taken["rows"],
        slots=tuple(slot for slot, _, _ in kept),
        completions=tuple(record for _, record, _ in kept),
        token_indices=tuple(index for _, _, index in kept),
        chunk_ends=taken["chunk_ends"],
    )


def rows_by_request(taken: Mapping[str, Any]) -> dict[int, dict[int, np.ndarray]]:
    """Rows that `RowTap.take` sent: request's number -> token index -> fp32 [V]."""
    values = np.frombuffer(taken["rows"], np.float32).reshape(-1, max(taken["width"], 1))
    rows: dict[int, dict[int, np.ndarray]] = {}
    for record, index, row in zip(taken["records"], taken["token_indices"], values, strict=True):
        rows.setdefault(record, {})[index] = row
    return rows
