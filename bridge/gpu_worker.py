"""vLLM's CUDA worker with what isojax adds: decode graphs, checked requests, weights unknown after a deep sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.v1.worker.gpu_worker import Worker

from bridge.decode_graphs import DecodeGraphs
from bridge.policy_worker import PolicyWorker
from bridge.sampled_log import SampledLog

if TYPE_CHECKING:
    from bridge.gpu_runner import PolicyModelState


class IsojaxGpuWorker(PolicyWorker, Worker):
    """Runs GpuPolicyModel under vLLM's V2 model runner."""

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up and graph captures; from then on every request and every step counts."""
        runner = cast("Any", self.model_runner)
        # Made with the cache, captured below.
        runner.cudagraph_manager = DecodeGraphs(runner.cudagraph_manager, self.policy.decode_buckets)
        result = super().compile_or_warm_up_model()
        self._state.serving = True
        return result

    @property
    def _state(self) -> PolicyModelState:
        return cast("Any", self.model_runner).model_state

    def isojax_log_sampled(self, on: bool) -> bool:
        """From now on keeps what is sampled, or no longer; it can."""
        self._state.log = SampledLog() if on else None
        return True

    def isojax_take_sampled(self) -> dict[str, bytes]:
        """What was sampled, see SampledLog.take."""
        return (self._state.log or SampledLog()).take()

    def isojax_describe(self) -> dict[str, Any]:
        """What runs here, and how many requests came back after vLLM had preempted them."""
        return {**super().isojax_describe(), "resumed_requests": self._state.resumed_requests}

    def sleep(self, level: int = 1) -> None:
        """Frees the cache and, by level, moves (1) or drops (2) the weights. Addresses stay, so captured graphs do too.

        Dropped weights come back as arbitrary bytes: the engine then holds none until the next sync.
        """
        if level > 1:
            self.policy.weights.begin_update()
        super().sleep(level)
