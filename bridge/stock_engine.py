"""StockEngine: vLLM's own model on an ordinary checkpoint behind the rollout protocol: the baseline arm's engine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge.completions import SampleRequest, completion_of, reported_values
from bridge.prompts import checked_ids
from bridge.start import EngineOptions, start_stock_vllm, stop_vllm
from bridge.weight_sync import empty_prefix_cache, require_idle
from contracts import EngineReport, ExecutionContract
from contracts.errors import BadConfig, UnsupportedModel, UnsupportedRequest, WeightDigestMismatch
from isojax.policy import PolicyConfig
from isojax.rl.rollout import Completion, Sampling
from isojax.weights.digest import digest
from isojax.weights.load import load_policy
from isojax.weights.names import unpack


class StockEngine:
    """Stock vLLM, set up as a user would set it up, that takes weights from a trainer in the same process.

    It has no contract and proves nothing: `report` refuses, and the digest that `sync` returns is that of what was
    sent, not of what vLLM holds, which keeps weights in forms of its own.
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        """Starts vLLM on a Hugging Face folder. settings: fields of `EngineOptions`.

        Raises BadConfig for an engine in a process of its own or one that sleeps, UnsupportedModel for what stock vLLM
        computes otherwise.
        """
        self.options = EngineOptions.of(settings)
        for name in ("separate_process", "sleep_mode"):
            if getattr(self.options, name):
                raise BadConfig(
                    field=f"engine.settings.{name}",
                    found=True,
                    allowed="false in the native arm",
                    reason="The stock engine reads the trainer's weights where they are, and stays awake.",
                )
        self._policy = load_policy(folder)
        _check_model(self._policy.config)
        self._llm = start_stock_vllm(Path(folder), self._policy.dtype, self._policy.config.max_position, self.options)
        self._digest: str | None = None

    @property
    def runs_beside_trainer(self) -> bool:
        """Never: it reads the trainer's weights where they are."""
        return False

    @property
    def contract(self) -> ExecutionContract:
        """Refused with UnsupportedRequest: there is none."""
        raise _no_contract()

    def report(self) -> EngineReport:
        """Refused with UnsupportedRequest: nothing that runs here is declared."""
        raise _no_contract()

    def sync(self, params: Mapping[str, Any]) -> str:
        """Gives vLLM packed parameters under their Hugging Face names, in place; returns their digest.

        Raises BadConfig for parameters that are not the policy's, UnsupportedRequest while requests run, and
        WeightDigestMismatch if vLLM keeps cached keys of the old weights.
        """
        self._policy.check_parameters(params)
        require_idle(self._llm)
        self._digest = None
        tensors = ((name, torch.from_dlpack(array)) for name, array in unpack(self._policy.config, params))
        # Through vLLM's own loader: it fuses, pads and repacks what it takes from a checkpoint.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        empty_prefix_cache(self._llm)
        self._digest = digest(params)
        return self._digest

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, full_rows: int = 0) -> list[Completion]:
        """Samples completions; see `RolloutEngine.generate`. Log-probabilities are those that vLLM itself reports.

        Raises also UnsupportedRequest for full rows, which stock vLLM has only as one Python object a number.
        """
        if full_rows:
            raise UnsupportedRequest(
                field="full_rows", found=full_rows, allowed="0", reason="A stock engine hands out no full rows."
            )
        if self._digest is None:
            raise WeightDigestMismatch(
                field="weights", found="no sync", allowed="engine.sync(params) first", reason="Whose weights are these?"
            )
        from vllm.inputs import TokensPrompt

        longest = self._llm.llm_engine.vllm_config.model_config.max_model_len - 1
        ids = checked_ids(prompts, sampling, self._policy.config.vocab_size, longest)
        pairs = itertools.product(range(len(prompts)), range(sampling.samples))
        requests = [SampleRequest(prompt, sample) for prompt, sample in pairs]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=ids[request.prompt]) for request in requests],
            [
                request.sampling_params(number, sampling, temperature=sampling.temperature)
                for number, request in enumerate(requests)
            ],
            use_tqdm=False,
        )
        return [
            completion_of(request, output, reported_values(output), self._digest, None)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def close(self) -> None:
        """Stops vLLM. The engine cannot be used afterwards."""
        stop_vllm(self._llm)
        self._digest = None


def _check_model(config: PolicyConfig) -> None:
    """Raise UnsupportedModel for what stock vLLM computes otherwise, or refuses in its first step alone."""
    if config.family == "qwen3" and config.attention_bias:
        raise UnsupportedModel(
            field="attention_bias",
            found=True,
            allowed="false in the native arm of the Qwen3 family",
            reason="Stock vLLM leaves the bias of Qwen3's output projection out, so it would run another model.",
        )
    if not torch.cuda.is_available():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if config.head_dim not in sizes:
            raise UnsupportedModel(
                field="head_dim",
                found=config.head_dim,
                allowed=sizes,
                reason="Stock vLLM's attention for CPUs takes these alone.",
            )


def _no_contract() -> UnsupportedRequest:
    return UnsupportedRequest(
        field="contract",
        found="stock vLLM, the native arm's engine",
        allowed="the exact arm's engine",
        reason="Stock kernels declare no rounding, so there is nothing that a contract could say of them.",
    )
