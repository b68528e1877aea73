"""NaN and infinity: which request, at which position, and the first region whose result held one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from bridge.batch_view import RowOwner
from contracts.errors import NonFiniteLogits

HEAD = "log_prob_rows"
"""The region that turns hidden states into log-probabilities."""


@dataclass(frozen=True)
class Fault:
    """A row that is not finite. Plain fields, since it crosses processes."""

    request: str
    position: int
    region: str
    record: int | None

    @classmethod
    def of(cls, owner: RowOwner, region: str) -> Fault:
        """The fault of one row."""
        return cls(owner.request, owner.position, region, owner.record)

    def as_dict(self) -> dict[str, Any]:
        """For vLLM's serialisation."""
        return asdict(self)

    def error(self, name: str | None = None) -> NonFiniteLogits:
        """The refusal; `name` replaces vLLM's request id by one that the caller knows."""
        return NonFiniteLogits(
            field=f"{name or f'request {self.request}'}, position {self.position}, region {self.region}",
            found="NaN or infinity",
            allowed="finite values",
            reason="Every log-probability from here on would be NaN. The weights overflow, or hold NaN or infinity.",
        )


def fault_of_values(request: str, record: int, position: int, values: np.ndarray) -> Fault | None:
    """The fault that a request's log-probabilities show by themselves: NaN or infinity, at the first of its rows.

    position: of the token that the first value's row was computed from. The head spoils a whole row where one logit is
    not finite, so any token's value tells; which region held the first one it does not.
    """
    bad = np.flatnonzero(~np.isfinite(values))
    return Fault(request, position + int(bad[0]), HEAD, record) if bad.size else None


def bad_rows(values: torch.Tensor) -> list[int]:
    """Rows of a float tensor [T, ...] that hold NaN or infinity. One sum a row finds them in nearly every step."""
    flat = values.reshape(values.shape[0], -1)
    if flat.dtype == torch.bfloat16:
        flat = flat.to(torch.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(flat.numpy().sum(axis=1)).all():
            return []
    # The sum of finite values can overflow, so only now each element is looked at.
    return np.flatnonzero(~np.isfinite(flat.numpy()).all(axis=1)).tolist()


class _FirstBadNode(fx.Interpreter):
    """Runs a graph and remembers the first node whose result is not finite in a given row."""

    def __init__(self, module: fx.GraphModule, row: int) -> None:
        super().__init__(module)
        self.row = row
        self.found: str | None = None

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        computed = node.op.startswith("call_") and isinstance(result, torch.Tensor) and result.is_floating_point()
        if self.found is None and computed and not bool(torch.isfinite(result[self.row]).all()):
            self.found = node.name
        return result


def first_bad_region(module: fx.GraphModule, row: int, *inputs: torch.Tensor) -> str:
    """Runs the (unmerged) graph again on the same inputs and names the node where the row stopped being finite.

    It must run where the graph ran, inside vLLM's forward context; the cache is written with the same values again.
    """
    interpreter = _FirstBadNode(module, row)
    interpreter.run(*inputs)
    return interpreter.found or HEAD
