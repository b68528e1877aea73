"""vLLM's CPU worker with what isojax adds: who owns a row, seeds that survive, reports and digests over RPC."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from bridge.batch_view import BatchView
from bridge.policy_worker import PolicyWorker


class IsojaxCpuWorker(PolicyWorker, CPUWorker):
    """Runs IsojaxPolicyForCausalLM under vLLM's V1 model runner."""

    def load_model(self, *arguments: Any, **keywords: Any) -> None:
        """Loads the policy and tells it which runner it serves, so that it can name the requests of a step."""
        super().load_model(*arguments, **keywords)
        self.policy.batch = BatchView(self.model_runner)

    def sample_tokens(self, *arguments: Any, **keywords: Any) -> Any:
        """Samples without vLLM's per-request generators: draws depend on (seed, token index), see bridge.sampling.

        On a CPU vLLM would also crash on them, winding one back after a prefill chunk (`Generator.set_offset`).
        """
        self.model_runner.input_batch.generators.clear()
        return super().sample_tokens(*arguments, **keywords)
