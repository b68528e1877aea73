"""VllmEngine: real vLLM behind isojax's rollout protocol, in this process or in one of its own."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bridge.completions import (
    SampleRequest,
    completion_of,
    prompt_scores,
    reported_values,
    rows_by_request,
    sampling_params,
    tapped_rows,
)
from bridge.engine_calls import first_fault, kept_by_worker, run_requests
from bridge.handshake import engine_report, kernel_record
from bridge.prompts import checked_ids, require_temperature
from bridge.readiness import require_awake, require_checked_weights, require_sleep
from bridge.sampled_log import logged_values
from bridge.start import EngineOptions, start_vllm, stop_vllm
from bridge.vllm_api import finish_weight_update
from bridge.weight_sync import WeightSender, empty_prefix_cache, require_idle
from bridge.weights import check_parameters
from contracts import EngineReport, ExecutionContract, check_kernels, load_contract
from contracts.errors import UnsupportedRequest, WeightDigestMismatch
from isojax.rl.rollout import Completion, Sampling, TappedRows
from isojax.weights.digest import digest
from isojax.weights.load import load_policy

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from bridge.stock_engine import StockEngine


class VllmEngine:
    """Implements `isojax.rl.rollout.RolloutEngine` on an exported policy folder.

    Nothing is sampled before the engine was reported for a handshake (`report`) and given weights (`sync`). It refuses
    to go on when a sync fails, when the prefix cache cannot be emptied, or when regions ran that the contract lacks.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        """Starts vLLM. settings: fields of `EngineOptions`.

        With `separate_process` the main module must be importable without side effects, since processes are spawned.
        Raises BadContract, BadConfig, MeshNotClaimed, UnsupportedModel.
        """
        self.folder = Path(folder)
        self.options = EngineOptions.of(settings)
        self._contract = load_contract(self.folder)
        self._policy = load_policy(self.folder, self._contract.semantics.parameter_dtype)
        self._llm = start_vllm(self.folder, self._contract, self.options)
        self._sender: WeightSender | None = None
        self._digest: str | None = None
        self._reported = False
        self._asleep = False
        self._checked: set[str] = set()
        self.cached_tokens: list[int] = []
        """Prompt tokens that the last call found in the prefix cache, one count a request."""
        self.tapped: TappedRows | None = None
        """Full rows of the last call that asked for them on the device."""

    @classmethod
    def native(cls, folder: str | Path, **settings: Any) -> StockEngine:
        """The baseline arm's engine: stock vLLM on an ordinary checkpoint, with the same settings."""
        from bridge.stock_engine import StockEngine

        return StockEngine(folder, **settings)

    @staticmethod
    def device_bytes() -> int | None:
        """Memory of the card that an engine would run on, in bytes; None without a card."""
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None

    @property
    def contract(self) -> ExecutionContract:
        """The contract in the policy folder, which this engine runs."""
        return self._contract

    @property
    def runs_beside_trainer(self) -> bool:
        """In a process of its own vLLM samples while the trainer computes; in the trainer's they take turns."""
        return self.options.separate_process

    def report(self) -> EngineReport:
        """What runs, read from the live engine, for `contracts.handshake` on the trainer's side."""
        self._reported = True
        return engine_report(self.folder, self._contract, self._llm.llm_engine.vllm_config, self.describe())

    def describe(self) -> dict[str, Any]:
        """What the worker says about itself, in plain values: dtypes, device, regions and kernels."""
        return self._rpc("isojax_describe")

    def sync(self, params: Mapping[str, Any]) -> str:
        """Gives the engine packed parameters through vLLM's weight transfer; returns the digest of what it now holds.

        Raises BadCheckpoint for names, shapes or dtypes that are not the policy's, UnsupportedRequest while requests
        run or it sleeps, and WeightDigestMismatch if the engine then holds something else or keeps cached keys of the
        old weights.
        """
        require_awake(self._asleep)
        check_parameters(params, self._policy)
        require_idle(self._llm)
        expected = digest(params)
        self._digest = None
        if self._sender is None:
            self._sender = WeightSender(self._llm, same_process=not self.options.separate_process)
        self._llm.start_weight_update()
        self._sender.send(params)
        finish_weight_update(self._llm, expected)
        held = self._rpc("isojax_weight_digest")
        if held != expected:
            raise WeightDigestMismatch(
                field="weight digest after sync",
                found=f"engine {held or 'without complete weights'}",
                allowed=f"trainer's {expected}",
                reason="The engine does not hold the trainer's weights; it refuses to generate until a sync succeeds.",
            )
        self._empty_prefix_cache()
        self._digest = held
        return held

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        full_rows: int = 0,
        rows_on_device: bool = False,
    ) -> list[Completion]:
        """Samples completions; see `RolloutEngine.generate`. Token ids in, token ids and fp32 log-probabilities out.

        rows_on_device: full rows are left where they were computed, in `tapped`, and the completions hold none.
        """
        weights = self._require_ready()
        self.tapped = None
        if rows_on_device and self.options.separate_process:
            raise UnsupportedRequest(
                field="rows_on_device",
                found="an engine in a process of its own",
                allowed="separate_process = False",
                reason="Its memory on the device is not this process's.",
            )
        ids = self._checked_ids(prompts, sampling)
        pairs = itertools.product(range(len(prompts)), range(sampling.samples))
        requests = [SampleRequest(prompt, sample) for prompt, sample in pairs]
        tokens = [ids[request.prompt] for request in requests]
        row_seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
        with kept_by_worker(self._rpc, full_rows, row_seed, separate_process=self.options.separate_process) as logged:
            params = [
                request.sampling_params(number, sampling, reported=not logged)
                for number, request in enumerate(requests)
            ]
            outputs = self._run(tokens, params)
            completed = [output.outputs[0].token_ids for output in outputs]
            if logged:
                values = logged_values(self._rpc("isojax_take_sampled"), completed)
            else:
                values = [reported_values(output) for output in outputs]
            # A completion's first row was computed from its prompt's last token.
            self._refuse_faults(requests, [(len(prompt) - 1, row) for prompt, row in zip(tokens, values, strict=True)])
            rows = rows_by_request(self._rpc("isojax_take_rows")) if full_rows and not rows_on_device else None
            if full_rows and rows_on_device:
                taken = self._rpc("isojax_take_rows_on_device")
                self.tapped = tapped_rows(taken, [len(completion) for completion in completed])
        self._check_served()
        return [
            completion_of(request, output, row, weights, None if rows is None else rows.get(number))
            for number, (request, output, row) in enumerate(zip(requests, outputs, values, strict=True))
        ]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Prefill alone: fp32 log-probability of every token but the first, given those before; one array a sequence.

        What the trainer's `policy.log_probs` gives for the same tokens. vLLM reads no prefix cache for such requests.
        """
        self._require_ready()
        ids = self._checked_ids(sequences, Sampling(max_tokens=1, greedy=True))
        params = [
            sampling_params(record=number, max_tokens=1, temperature=0.0, prompt_logprobs=0)
            for number in range(len(sequences))
        ]
        outputs = self._run(ids, params)
        scores = [prompt_scores(sequence, output) for sequence, output in zip(sequences, outputs, strict=True)]
        requests = [SampleRequest(number, 0) for number in range(len(sequences))]
        self._refuse_faults(requests, [(0, score) for score in scores])
        return scores

    def sleep(self, level: int = 1) -> None:
        """Gives the card's memory back until `wake_up`: the cache is dropped, the weights move to host memory (level 1)
        or are dropped as well (level 2).

        Raises UnsupportedRequest for another level, without the setting sleep_mode, while asleep or requests run.
        """
        require_awake(self._asleep)
        require_sleep(level, prepared=self.options.sleep_mode)
        require_idle(self._llm)
        self._asleep = True
        if level == 2:
            self._digest = None
        self._llm.sleep(level=level)

    def wake_up(self) -> None:
        """Takes the memory back, at the same addresses, with an empty cache; no-op for an engine that is awake.

        After level 2 nothing is generated before the next `sync`. Raises WeightDigestMismatch if other weights come
        back than went to sleep.
        """
        if not self._asleep:
            return
        self._llm.wake_up()
        self._asleep = False
        self._empty_prefix_cache()
        if self._digest is None:
            return
        expected, self._digest = self._digest, None
        held = self._rpc("isojax_weight_digest", True)
        if held != expected:
            raise WeightDigestMismatch(
                field="weight digest after waking up",
                found=held,
                allowed=expected,
                reason="The weights did not survive the sleep; it refuses to generate until a sync succeeds.",
            )
        self._digest = expected

    def close(self) -> None:
        """Stops vLLM and removes the staging file. The engine cannot be used afterwards."""
        if self._asleep:
            # Memory that was given back cannot be freed once more.
            self._llm.wake_up()
            self._asleep = False
        if self._sender is not None:
            self._sender.close()
        stop_vllm(self._llm)
        self._digest = None

    def _run(self, tokens: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
        outputs = run_requests(self._llm, tokens, params)
        self.cached_tokens = [output.num_cached_tokens or 0 for output in outputs]
        return outputs

    def _require_ready(self) -> str:
        require_awake(self._asleep)
        return require_checked_weights(self._llm, reported=self._reported, digest=self._digest)

    def _checked_ids(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        longest = self._llm.llm_engine.vllm_config.model_config.max_model_len - 1
        require_temperature(sampling, self._contract)
        return checked_ids(prompts, sampling, self._contract.model.vocab_size, longest)

    def _refuse_faults(self, requests: Sequence[SampleRequest], values: Sequence[tuple[int, np.ndarray]]) -> None:
        refusal = first_fault(self._rpc, requests, values)
        if refusal is not None:
            # The cache holds keys of the rows that failed.
            self._empty_prefix_cache()
            raise refusal

    def _empty_prefix_cache(self) -> None:
        try:
            empty_prefix_cache(self._llm)
        except WeightDigestMismatch:
            self._digest = None
            raise

    def _check_served(self) -> None:
        """Compares the regions that really ran with the contract, the first time that each case has run."""
        if len(self._checked) == 2:
            return
        described = self.describe()
        new = {case: names for case, names in described["served"].items() if case not in self._checked}
        check_kernels(self._contract, kernel_record(new), what="served")
        self._checked |= set(new)

    def _rpc(self, method: str, *arguments: Any) -> Any:
        require_awake(self._asleep)
        return self._llm.collective_rpc(method, args=arguments)[0]
