"""vLLM's CPU worker with what isojax adds: who owns a row, seeds that survive, reports and digests over RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from vllm.v1.worker.cpu_worker import CPUWorker

from bridge.batch_view import BatchView
from bridge.row_tap import RowTap
from contracts.errors import UnsupportedModel

if TYPE_CHECKING:
    from bridge.attention_backend import CachedAttentionLayer
    from bridge.model import IsojaxPolicyForCausalLM


class IsojaxCpuWorker(CPUWorker):
    """Methods named isojax_... are called by VllmEngine through vLLM's collective RPC; they return plain values."""

    @property
    def policy(self) -> IsojaxPolicyForCausalLM:
        """The model that this worker runs."""
        return cast("IsojaxPolicyForCausalLM", self.get_model())

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

    def shutdown(self) -> None:
        """Lets go of the caches, which JAX sees through views, so that their memory can be freed."""
        runner = getattr(self, "model_runner", None)
        if runner is not None and getattr(runner, "model", None) is not None:
            for layer in self.policy.layers:
                cast("CachedAttentionLayer", layer).impl.release()
        super().shutdown()

    def reload_weights(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Refused: weights change through the weight transfer alone, which checks digests."""
        raise UnsupportedModel(
            field="reload_weights",
            found="a reload from files",
            allowed="VllmEngine.sync, or vLLM's weight transfer with the backend isojax",
            reason="Nothing would check which weights the engine holds afterwards.",
        )

    def isojax_describe(self) -> dict[str, Any]:
        """What runs here: see IsojaxPolicyForCausalLM.describe."""
        return self.policy.describe()

    def isojax_weight_digest(self, recompute: bool = False) -> str | None:
        """The digest of the weights held, from the last load or sync, or computed anew from memory."""
        weights = self.policy.weights
        return weights.compute_digest() if recompute else weights.digest

    def isojax_tap_rows(self, limit: int, seed: int) -> None:
        """From now on keeps up to `limit` full rows; 0 stops."""
        self.policy.tap = RowTap(limit, seed) if limit else None

    def isojax_take_rows(self) -> dict[str, Any]:
        """The rows kept, see RowTap.take."""
        return (self.policy.tap or RowTap(0, 0)).take()

    def isojax_take_faults(self) -> list[dict[str, Any]]:
        """Rows that were not finite since the last call."""
        faults, self.policy.faults = self.policy.faults, []
        return [fault.as_dict() for fault in faults]
