"""What isojax adds to vLLM's worker on any device: reports, digests, rows and faults over RPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from bridge.row_tap import RowTap
from contracts.errors import UnsupportedModel

if TYPE_CHECKING:
    from bridge.attention_backend import CachedAttentionLayer


class PolicyWorker:
    """Methods named isojax_... are called by VllmEngine through vLLM's collective RPC; they return plain values."""

    @property
    def policy(self) -> Any:
        """The model that this worker runs."""
        return cast("Any", self).get_model()

    def shutdown(self) -> None:
        """Lets go of the caches, so that their memory can be freed."""
        runner = getattr(self, "model_runner", None)
        if runner is not None and getattr(runner, "model", None) is not None:
            for layer in self.policy.layers:
                cast("CachedAttentionLayer", layer).impl.release()
        cast("Any", super()).shutdown()

    def reload_weights(self, *arguments: Any, **keywords: Any) -> NoReturn:
        """Refused: weights change through the weight transfer alone, which checks digests."""
        raise UnsupportedModel(
            field="reload_weights",
            found="a reload from files",
            allowed="VllmEngine.sync, or vLLM's weight transfer with the backend isojax",
            reason="Nothing would check which weights the engine holds afterwards.",
        )

    def isojax_describe(self) -> dict[str, Any]:
        """What runs here: see the model's `describe`."""
        return self.policy.describe()

    def isojax_weight_digest(self, recompute: bool = False) -> str | None:
        """The digest of the weights held, from the last load or sync, or computed anew from memory."""
        weights = self.policy.weights
        return weights.compute_digest() if recompute else weights.digest

    def isojax_log_sampled(self, on: bool) -> bool:
        """From now on keeps what is sampled, or no longer; whether it can. Where it cannot, vLLM reports the values."""
        return False

    def isojax_tap_rows(self, limit: int, seed: int) -> None:
        """From now on keeps up to `limit` full rows; 0 stops."""
        self.policy.tap = RowTap(limit, seed) if limit else None

    def isojax_take_rows(self) -> dict[str, Any]:
        """The rows kept, see RowTap.take."""
        return (self.policy.tap or RowTap(0, 0)).take()

    def isojax_take_rows_on_device(self) -> dict[str, Any]:
        """The rows kept, see RowTap.take_on_device; for a caller in this process."""
        return (self.policy.tap or RowTap(0, 0)).take_on_device()

    def isojax_take_faults(self) -> list[dict[str, Any]]:
        """Rows that were not finite since the last call."""
        faults, self.policy.faults = self.policy.faults, []
        return [fault.as_dict() for fault in faults]
