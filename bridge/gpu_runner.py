"""Where vLLM's V2 model runner asks the model: the state of its requests, and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from bridge.device_sampling import RequestSlots, StepRows, draw_rows, to_device
from bridge.requests import check_sampling_params

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from bridge.gpu_model import GpuPolicyModel
    from bridge.sampled_log import SampledLog


class PolicyModelState(DefaultModelState):
    """vLLM's own handling of a text model, with our sampler and what it must know of every request."""

    def __init__(
        self, vllm_config: VllmConfig, model: GpuPolicyModel, encoder_cache: Any, device: torch.device
    ) -> None:
        """Signature set by vLLM."""
        super().__init__(vllm_config, model, encoder_cache, device)
        self.slots = RequestSlots(self.max_num_reqs, vllm_config.model_config.seed)
        self.serving = False
        """Set by the worker after vLLM's warm-up, whose requests use every sampling parameter there is."""
        self.log: SampledLog | None = None
        """Where to keep what is sampled, while somebody asks for it."""
        self.resumed_requests = 0
        """Requests that were preempted after a token was sampled and are computed again from their prompt on."""

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Raises RefusedRequest for sampling parameters outside of the contract, WeightDigestMismatch without weights.

        Weights are unknown after a deep sleep, where vLLM would go on with whatever the memory holds.
        """
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        if params is None:
            return
        if self.serving:
            check_sampling_params(params)
            cast("GpuPolicyModel", self.model).weights.require_known()
        self.slots.add(req_index, params)
        known, prompt = new_req_data.prefill_token_ids, new_req_data.prompt_token_ids
        self.resumed_requests += known is not None and prompt is not None and len(known) > len(prompt)

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, None]:
        """vLLM's hook: the sampler that takes the place of the given one."""
        return PolicySampler(sampler, cast("GpuPolicyModel", self.model), self), None


class PolicySampler(Sampler):
    """Draws from the rows that `compute_logits` returned, untouched, and hands them to the row tap.

    Everything around the draw is vLLM's: with logprobs_mode raw_logits it gathers the drawn tokens' values out of the
    same rows, so what it reports is the region's own fp32 number. `VllmEngine` does not ask it for them and has them
    kept in a log. Nothing here waits for the device.
    """

    def __init__(self, base: Sampler, model: GpuPolicyModel, state: PolicyModelState) -> None:
        """Takes over all of vLLM's sampler, which is already built."""
        self.__dict__.update(base.__dict__)
        self._model = model
        self._state = state
        self._rows: StepRows | None = None

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Draws one token a row. logits: the fp32 log-probabilities of `compute_logits`, [N, V]."""
        rows = self._rows = self._state.slots.rows(input_batch, self.req_states.prompt_len.np)
        if self._state.serving:
            decode = bool(np.all(input_batch.num_scheduled_tokens == 1))
            self._model.note_step(input_batch.num_tokens_after_padding, decode=decode)
            if self._model.tap is not None:
                self._model.tap.offer(logits, rows.records_N, rows.token_indices_N, rows.sampled_N)
        return super().__call__(logits, input_batch)

    def sample(self, logits: torch.Tensor, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn tokens, int64 [N], and the rows themselves, in place of vLLM's processed logits."""
        rows = self._rows
        assert rows is not None
        uniforms_N = to_device(rows.uniforms_N, logits.device)
        greedy_N = to_device(rows.greedy_N, logits.device) if rows.greedy_N.any() else None
        drawn_N = draw_rows(logits, uniforms_N, greedy_N)
        if self._state.log is not None:
            self._state.log.add(logits, drawn_N, rows)
        return drawn_N, logits
