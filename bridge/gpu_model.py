"""The model class that vLLM runs on a card: the policy's own forward, translated, over its sealed kernels."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from bridge.arrays import dtype_name
from bridge.attention_backend import cached_attention_layers, step_metadata
from bridge.gpu_attention import GpuAttentionBackend, GpuStepMetadata
from bridge.graphs import PolicyGraphs, region_names
from bridge.handshake import ENGINE_CASES
from bridge.jax_api import keep_off_the_card
from bridge.kernel_launchers import LAUNCHERS, compile_kernels, engine_programs
from bridge.ptxas import ptxas_version
from bridge.step_inputs import StepInputs, smallest_bucket
from bridge.translate import dense_operands
from bridge.weights import EngineWeights
from contracts import bits_float, float_bits, load_contract
from isojax.kernels import load_kernels
from isojax.policy.rope import rope_table_digest
from isojax.weights.load import load_policy
from pallas_kernels.attention import DECODE_REGION, PAGED_REGION

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from bridge.attention_backend import CachedAttentionLayer
    from bridge.non_finite import Fault
    from bridge.row_tap import RowTap

# T: tokens of the padded step, H: hidden size, V: vocabulary, N: rows of log-probabilities.

Kernels = dict[str, set[str]]
"""Digests of kernels by region."""


def current_card() -> torch.device:
    """The card that vLLM has chosen for this worker."""
    return torch.device("cuda", torch.cuda.current_device())


class GpuPolicyModel(nn.Module):
    """An exported sm90 policy in vLLM's V2 model runner, eager or in full CUDA graphs.

    `forward` returns final-normed hidden states, `compute_logits` fp32 log-probabilities at the contract's temperature,
    which vLLM hands on verbatim (logprobs_mode raw_logits). Neither waits for the device.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Reads the policy folder, compiles its kernels, allocates its parameters; vLLM then calls `load_weights`.

        Raises BadBundle for kernels that are not the contract's, LaunchRefused for one that does not compile.
        """
        super().__init__()
        keep_off_the_card()
        folder = Path(vllm_config.model_config.model)
        device = current_card()
        self.contract = load_contract(folder)
        bundle = load_kernels(folder, self.contract)
        shapes = bundle.shapes
        policy = load_policy(folder, self.contract.semantics.parameter_dtype)
        config = policy.config
        largest = smallest_bucket(
            shapes.token_buckets, vllm_config.scheduler_config.max_num_batched_tokens, "max_num_batched_tokens"
        )
        buckets = [bucket for bucket in shapes.token_buckets if bucket <= largest]
        graphs = PolicyGraphs.translate(policy, str(device), write_with_rope=True)
        self.weights = EngineWeights(policy, widened=frozenset(), plain=policy.parameter_shapes.keys(), device=device)
        self._temperature = bits_float(self.contract.semantics.temperature)
        table = torch.from_numpy(np.array(policy.buffers["rope_table"]))
        self.register_buffer("rope_table", table.to(device), persistent=False)
        temperature = torch.tensor(self._temperature, dtype=torch.float32, device=device)
        self.register_buffer("temperature", temperature, persistent=False)
        self.inputs = StepInputs(buckets, shapes.max_requests, shapes.request_pages, shapes.page_size, device)
        self.decode_buckets = tuple(bucket for bucket in buckets if bucket in shapes.decode_buckets)
        """Tokens that the attention of decode steps is sealed for."""
        self._head_rows = shapes.head_rows
        for rows in self._head_rows:
            states = torch.zeros(rows, config.hidden_size, dtype=self.weights.dtype, device=device)
            self.register_buffer(f"head_input_{rows}", states, persistent=False)
        constants = {"rope_table": self.get_buffer("rope_table"), "temperature": self.get_buffer("temperature")}
        self._hidden, self._head = map(dense_operands, graphs.bind(self.weights, constants))
        self.layers = cached_attention_layers(vllm_config, config, self.weights.dtype, GpuAttentionBackend)
        programs = engine_programs(bundle.programs, buckets, self._head_rows)
        self.compile_seconds = compile_kernels(programs, device)
        self._manifest = bundle.sha256
        self.tap: RowTap | None = None
        self.faults: list[Fault] = []
        """Always empty: a row that is not finite is known by its log-probability, without asking the device."""
        # What was launched for a bucket, in decode steps or in others, when its graph was captured: every replay does.
        self._launched: dict[tuple[int, bool], Kernels] = {}
        self._launched_by_head: Kernels = {}
        self._served: dict[str, set[int]] = {}

    def get_model_state_cls(self) -> type[Any]:
        """vLLM's V2 hook: the class that holds what it must know of running requests."""
        from bridge.gpu_runner import PolicyModelState

        return PolicyModelState

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
        metadata: GpuStepMetadata | None = step_metadata()
        if metadata is None:
            operands = self.inputs.profiling(tokens)
        else:
            operands = metadata.operands = self.inputs.prepare(input_ids, positions, metadata.batch)
        bucket = operands.tokens_T.shape[0]
        launched = {} if metadata is None else self._launched.setdefault((bucket, metadata.decode), {})
        with LAUNCHERS.recording(launched):
            return self._hidden(operands.tokens_T, operands.positions_T)[:tokens]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fp32 log-probabilities [N, V] of hidden states [N, H]: what vLLM takes for logits.

        More rows than the largest sealed bucket, as for a prompt's log-probabilities, are computed a bucket at a time.
        A row with a logit that is not finite is NaN throughout.
        """
        count, largest = hidden_states.shape[0], self._head_rows[-1]
        with LAUNCHERS.recording(self._launched_by_head):
            if count <= largest:
                return self._log_probs(hidden_states)
            result = torch.empty(count, self.vocab_size, dtype=torch.float32, device=hidden_states.device)
            for start in range(0, count, largest):
                part = slice(start, min(start + largest, count))
                result[part] = self._log_probs(hidden_states[part])
            return result

    @property
    def vocab_size(self) -> int:
        """Columns of a row of log-probabilities."""
        return self.weights.config.vocab_size

    def note_step(self, tokens: int, *, decode: bool) -> None:
        """Counts a step of this many tokens as served, in a case. Called for real requests alone.

        A step of decoding that is padded to a size without decode's kernels runs, and counts as, a step of any kind.
        """
        bucket = self.inputs.bucket_of(tokens)
        case = "engine_decode" if decode and (bucket, True) in self._launched else "engine_prefill"
        self._served.setdefault(case, set()).add(bucket)

    def describe(self) -> dict[str, Any]:
        """Plain facts for the engine's report: dtypes as they are in memory, kernels that were compiled and ran."""
        any_step = region_names(self._hidden, self._head)
        decode_step = sorted(DECODE_REGION.name if name == PAGED_REGION.name else name for name in any_step)
        regions = dict(zip(ENGINE_CASES, (any_step, decode_step), strict=True))
        return {
            "regions": any_step,
            "installed": {
                case: {name: sorted(LAUNCHERS.digests(name)) for name in names} for case, names in regions.items()
            },
            "served": {case: self._kernels_of(case, buckets) for case, buckets in self._served.items()},
            "device_kind": torch.cuda.get_device_name(self.weights.head.device),
            "temperature": float_bits(float(cast("torch.Tensor", self.temperature))),
            "rope_table_digest": rope_table_digest(cast("torch.Tensor", self.rope_table).cpu().numpy()),
            "parameter_dtype": dtype_name(self.weights.dtype),
            "kv_cache_dtype": dtype_name(cast("CachedAttentionLayer", self.layers[0]).kv_cache.dtype),
            "head_rows": int(self.weights.head.shape[0]),
            "head_operand_dtype": dtype_name(self.weights.head.dtype),
            "head_output_dtype": dtype_name(self._log_probs(self.get_buffer(f"head_input_{self._head_rows[0]}")).dtype),
            "weight_digest": self.weights.digest,
            "kernel_manifest": self._manifest,
            "ptxas": ptxas_version(),
            "compile_seconds": self.compile_seconds,
        }

    def _log_probs(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        rows = hidden_NH.shape[0]
        bucket = smallest_bucket(self._head_rows, rows, "rows of log-probabilities")
        # vLLM's rows are a slice or a gather of their own; the kernel wants a whole bucket at an aligned address.
        states = self.get_buffer(f"head_input_{bucket}")
        states[:rows] = hidden_NH
        return self._head(states)[:rows]

    def _kernels_of(self, case: str, buckets: set[int]) -> dict[str, list[str]]:
        found: Kernels = {}
        decode = case == "engine_decode"
        for kernels in (self._launched_by_head, *(self._launched.get((bucket, decode), {}) for bucket in buckets)):
            for region, digests in kernels.items():
                found.setdefault(region, set()).update(digests)
        return {region: sorted(digests) for region, digests in found.items()}
