"""The model class that vLLM runs: the policy's own forward, translated, over vLLM's batch and paged cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
import torch
from torch import nn

from bridge.arrays import dispatch_synchronously, dtype_name, shared_views, to_torch
from bridge.attention_backend import StepMetadata, cached_attention_layers, step_metadata
from bridge.batch_view import NO_RECORD
from bridge.buckets import bucket_of
from bridge.graphs import PolicyGraphs, region_names
from bridge.non_finite import HEAD, Fault, bad_rows, first_bad_region
from bridge.translate import merge_segments
from bridge.weights import EngineWeights
from contracts import bits_float, float_bits, load_contract
from isojax.policy.rope import rope_table_digest
from isojax.weights.load import load_policy
from pallas_kernels import counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from bridge.attention_backend import CachedAttentionLayer
    from bridge.batch_view import BatchView, RowOwner
    from bridge.row_tap import RowTap

# T: tokens of the padded step, H: hidden size, V: vocabulary, N: rows of log-probabilities.


class IsojaxPolicyForCausalLM(nn.Module):
    """An exported policy in vLLM. There is no second model definition: the policy's own functions are traced.

    `forward` returns final-normed hidden states, `compute_logits` fp32 log-probabilities at the contract's temperature,
    which vLLM hands on verbatim (logprobs_mode raw_logits) and samples from at its own temperature 1.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Reads the policy folder, translates the policy, allocates its parameters; vLLM then calls `load_weights`."""
        super().__init__()
        dispatch_synchronously()
        folder = Path(vllm_config.model_config.model)
        self.contract = load_contract(folder)
        policy = load_policy(folder, self.contract.semantics.parameter_dtype)
        config = policy.config
        graphs = PolicyGraphs.translate(policy)
        self.weights = EngineWeights(policy, widened=graphs.widened, plain=graphs.plain)
        self._temperature = bits_float(self.contract.semantics.temperature)
        self._rope_table = to_torch(policy.buffers["rope_table"]).clone()
        constants = {
            "rope_table": self._rope_table,
            "temperature": torch.tensor(self._temperature, dtype=torch.float32),
        }
        self._hidden_graph, self._head_graph = graphs.bind(self.weights, constants)
        # The same graphs with fewer calls; the unmerged ones are what people read and what faults are found in.
        self._hidden, self._head = merge_segments(self._hidden_graph), merge_segments(self._head_graph)
        self.layers = cached_attention_layers(vllm_config, config, self.weights.dtype)
        self.batch: BatchView | None = None
        self.tap: RowTap | None = None
        self.faults: list[Fault] = []
        self._step: _Step | None = None
        self._inputs: dict[int, list[torch.Tensor]] = {}
        # Counts are the process's; what ran before this model was somebody else's.
        self._served_before = Counter(counters.snapshot().served)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fills the parameters from Hugging Face tensors (see `EngineWeights.load`)."""
        return self.weights.load(weights)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [T, H]."""
        return torch.index_select(self.weights.tensor("embed", self.weights.dtype), 0, input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: object = None,
    ) -> torch.Tensor:
        """Hidden states [tokens, H] of vLLM's flattened batch. Padded once, here, to a bucket, with inert rows."""
        tokens = input_ids.shape[0]
        tokens_T, positions_T = self._inputs_of(bucket_of(tokens))
        for padded, given in ((tokens_T, input_ids), (positions_T, positions)):
            padded[:tokens] = given
            padded[tokens:] = 0
        metadata = step_metadata()
        with _case_of(metadata):
            hidden_TH = self._hidden(tokens_T, positions_T)
        hidden = hidden_TH[:tokens]
        self._step = None
        if metadata is not None and self.batch is not None:
            self._step = _Step(metadata, positions_T, hidden)
            for row in bad_rows(hidden[: metadata.num_tokens]):
                self._step.regions[row] = first_bad_region(self._hidden_graph, row, tokens_T, positions_T)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fp32 log-probabilities [N, V] of hidden states [N, H]: what vLLM takes for logits.

        Raises NonFiniteLogits for a row that is not finite, except where VllmEngine asked to be told instead.
        """
        rows = hidden_states.shape[0]
        hidden_NH = torch.zeros(bucket_of(rows), hidden_states.shape[1], dtype=hidden_states.dtype)
        hidden_NH[:rows] = hidden_states
        with _case_of(None if self._step is None else self._step.metadata):
            log_probs = self._head(hidden_NH)[:rows]
        if self._step is not None and self.batch is not None:
            self._check_and_tap(log_probs, hidden_states, self._step, self.batch)
        return log_probs

    def describe(self) -> dict[str, Any]:
        """Plain facts for the engine's report: dtypes as they are in memory, regions of the graphs, calls served."""
        served: dict[str, list[str]] = {}
        for region, case in Counter(counters.snapshot().served) - self._served_before:
            if case is not None and case.startswith("engine_"):
                served.setdefault(case, []).append(region)
        hidden_size = self.weights.config.hidden_size
        probe = self._head(torch.zeros(bucket_of(1), hidden_size, dtype=self.weights.dtype))
        return {
            "regions": region_names(self._hidden_graph, self._head_graph),
            "served": {case: sorted(names) for case, names in served.items()},
            "device_kind": jax.local_devices(backend="cpu")[0].device_kind,
            "temperature": float_bits(self._temperature),
            "rope_table_digest": rope_table_digest(self._rope_table.numpy()),
            "parameter_dtype": dtype_name(self.weights.dtype),
            "kv_cache_dtype": dtype_name(cast("CachedAttentionLayer", self.layers[0]).kv_cache.dtype),
            "head_rows": int(self.weights.head.shape[0]),
            "head_operand_dtype": dtype_name(self.weights.dtype),
            "head_output_dtype": dtype_name(probe.dtype),
            "weight_digest": self.weights.digest,
        }

    def _inputs_of(self, bucket: int) -> list[torch.Tensor]:
        """Tokens and positions of a bucket, int32 [bucket] each: the same memory at every step."""
        if bucket not in self._inputs:
            self._inputs[bucket] = [torch.zeros(bucket, dtype=torch.int32) for _ in range(2)]
            shared_views.add(self._inputs[bucket])
        return self._inputs[bucket]

    def _check_and_tap(self, log_probs: torch.Tensor, hidden: torch.Tensor, step: _Step, batch: BatchView) -> None:
        owners = step.owners(hidden, batch)
        for row in bad_rows(log_probs):
            owner, flat = owners[row]
            fault = Fault.of(owner, step.regions.get(flat, HEAD))
            if owner.record is None:
                raise fault.error()
            self.faults.append(fault)
            # Something that vLLM can sample from; VllmEngine knows the row by its infinity and drops the request.
            log_probs[row] = -torch.inf
            log_probs[row, 0] = torch.inf
        if self.tap is not None and not step.is_prompt_slice(hidden):
            records_N = np.array([NO_RECORD if owner.record is None else owner.record for owner, _ in owners], np.int64)
            token_indices_N = np.array([owner.token_index for owner, _ in owners], np.int64)
            self.tap.offer(
                log_probs, records_N, token_indices_N, np.array([owner.sampled for owner, _ in owners], bool)
            )


class _Step:
    """The last forward, as far as its rows of log-probabilities need it."""

    def __init__(self, metadata: StepMetadata, positions_T: torch.Tensor, hidden: torch.Tensor) -> None:
        self.metadata = metadata
        self.regions: dict[int, str] = {}
        self._positions = positions_T
        self._hidden = hidden

    def is_prompt_slice(self, hidden: torch.Tensor) -> bool:
        """Whether these are consecutive rows of the forward's result: vLLM slices it for prompt log-probabilities."""
        return hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr()

    def owners(self, hidden: torch.Tensor, batch: BatchView) -> list[tuple[RowOwner, int]]:
        """Owner of each row, and the row of the step that it was computed from."""
        requests = self.metadata.request_of_token_T[: self.metadata.num_tokens]
        if self.is_prompt_slice(hidden):
            first = hidden.storage_offset() // hidden.shape[1]
            flat = list(range(first, first + hidden.shape[0]))
        else:
            # One row a request, in the batch's order: that of its last token.
            flat = (torch.searchsorted(requests, torch.arange(len(batch), dtype=torch.int32), right=True) - 1).tolist()
        return [(batch.owner(int(requests[row]), int(self._positions[row])), row) for row in flat]


def _case_of(metadata: StepMetadata | None) -> AbstractContextManager[None]:
    """What the step's calls count as. A step that mixes both counts as prefill; vLLM's profiling runs as neither."""
    if metadata is None:
        return nullcontext()
    return counters.case("engine_decode" if metadata.decode else "engine_prefill")
