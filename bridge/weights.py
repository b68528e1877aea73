"""The engine's parameters: the trainer's packed arrays in torch memory that never moves, widened for matmuls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bridge.arrays import torch_dtype
from bridge.digest import tensor_lanes
from contracts.errors import BadCheckpoint, WeightDigestMismatch
from contracts.weight_digest import combine, tensor_id_of
from isojax.weights.names import TensorEntry, name_table

if TYPE_CHECKING:
    from isojax.policy import Policy


ROW_ALIGNMENT = 256
"""Bytes: what sealed kernels ask of an operand's address."""


class EngineWeights(nn.Module):
    """Every packed parameter of a policy.

    XLA:CPU multiplies in fp32, so a bf16 matrix would be widened at every step. It is kept widened instead, which is
    exact: bf16 is fp32 with 16 zero bits. A parameter that is read in both ways (a tied head) is kept twice, and both
    are written by the same call, so that neither can go stale. On a card nothing is widened, and every layer's slice of
    a stacked parameter starts at a multiple of 256 bytes, as sealed kernels need it.
    """

    def __init__(
        self, policy: Policy, *, widened: Set[str], plain: Set[str], device: str | torch.device = "cpu"
    ) -> None:
        """Allocates zeros. widened: parameters to hold as fp32; plain: those to hold in the policy's dtype."""
        super().__init__()
        self.config = policy.config
        self.dtype = torch_dtype(policy.parameter_shapes["embed"].dtype)
        self.widened = frozenset(widened)
        self.digest: str | None = None
        """Of the weights held, None before the first load and while an update is under way."""
        self._missing: dict[str, int] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}
        for name, shape in policy.parameter_shapes.items():
            dtypes = [self.dtype] if name in plain or self.dtype == torch.float32 or name not in widened else []
            if name in widened and self.dtype != torch.float32:
                dtypes.append(torch.float32)
            aligned = torch.device(device).type != "cpu" and _is_stacked(name)
            tensors = [_zeros(shape.shape, dtype, torch.device(device), aligned) for dtype in dtypes]
            parameter = nn.Parameter(tensors[0], requires_grad=False)
            parameter.weight_loader = self._loader(name)  # type: ignore[attr-defined]  # vLLM's convention
            self.register_parameter(name.replace(".", "_"), parameter)
            # vLLM must see every byte of the model; the second form of a parameter is derived, so it is a buffer.
            if len(tensors) == 2:
                self.register_buffer(f"{name.replace('.', '_')}_widened", tensors[1], persistent=False)
            self._tensors[name] = tensors

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The memory that holds a parameter in this dtype. Raises KeyError if it was not asked for when allocating."""
        for tensor in self._tensors[name]:
            if tensor.dtype == dtype:
                return tensor
        raise KeyError(f"{name} is not held in {dtype}")

    @property
    def head(self) -> torch.Tensor:
        """The output projection, [V, H]."""
        return self._tensors["embed" if self.config.tied_head else "lm_head"][0]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fills all parameters from Hugging Face tensors, in any order; returns the names of the filled parameters.

        Raises BadCheckpoint for a tensor that is unknown, misshapen, of another dtype or missing.
        """
        self.begin_update()
        table = {entry.hugging_face: entry for entry in name_table(self.config)}
        for name, tensor in tensors:
            if name not in table:
                raise BadCheckpoint(
                    field=name,
                    found="a tensor",
                    allowed="the policy's tensors",
                    reason="The policy has no such tensor.",
                )
            entry = table[name]
            parameter: Any = self.get_parameter(entry.packed.replace(".", "_"))
            # Through the attribute, as vLLM's own loaders do: tools wrap it.
            parameter.weight_loader(parameter, tensor, entry)
        wrong = self.finish_update()
        if wrong:
            raise BadCheckpoint(
                field=", ".join(sorted(wrong)),
                found=f"{sorted(wrong.values())} elements missing (negative: written twice)",
                allowed="every element exactly once",
                reason="The checkpoint does not hold all of the policy, or holds a part of it twice.",
            )
        return {f"weights.{name.replace('.', '_')}" for name in self._tensors}

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Overwrites elements of a packed parameter from flat index `start` on, in place, in every form that is held.

        Raises BadCheckpoint for another dtype (a cast would round), an unknown name or too many elements.
        """
        held = self._tensors.get(name)
        if held is None or values.dtype != self.dtype or start + values.numel() > held[0].numel():
            raise BadCheckpoint(
                field=name,
                found=f"{values.numel()} elements of {values.dtype} from index {start} on",
                allowed=f"{held[0].numel() if held else 'no'} elements of {self.dtype}",
                reason="The engine copies weights and never converts them.",
            )
        for tensor in held:
            _write(tensor, start, values)
        self._missing[name] -= values.numel()

    def require_known(self) -> None:
        """Raises WeightDigestMismatch where no load or update was completed since the weights were lost."""
        if self.digest is None:
            raise WeightDigestMismatch(
                field="weights of the engine",
                found="unknown: dropped by a deep sleep, or an update that was not completed",
                allowed="those of a completed load or weight update",
                reason="Tokens sampled from them would belong to no policy.",
            )

    def begin_update(self) -> None:
        """From here on the engine holds no known weights."""
        self.digest = None
        self._missing = {name: tensors[0].numel() for name, tensors in self._tensors.items()}

    def finish_update(self) -> dict[str, int]:
        """Takes the digest; if some elements were not written, takes none and returns how many, by parameter."""
        wrong = {name: count for name, count in self._missing.items() if count}
        if not wrong:
            self.digest = self.compute_digest()
        return wrong

    def compute_digest(self) -> str:
        """The digest of what is held now. Raises BadCheckpoint if the two forms of a parameter differ."""
        return combine(self._lanes(name, tensors) for name, tensors in self._tensors.items())

    def _lanes(self, name: str, tensors: list[torch.Tensor]) -> tuple[int, int]:
        found = {tensor_lanes(_narrow(tensor, self.dtype), tensor_id_of(name)) for tensor in tensors}
        if len(found) != 1:
            raise BadCheckpoint(
                field=name,
                found="two different values in the engine",
                allowed="one parameter, held plain and widened",
                reason="Its cached form is stale.",
            )
        return found.pop()

    def _loader(self, name: str) -> Callable[[nn.Parameter, torch.Tensor, TensorEntry], None]:
        def load(parameter: nn.Parameter, loaded: torch.Tensor, entry: TensorEntry) -> None:
            if tuple(loaded.shape) != entry.shape or loaded.dtype != self.dtype:
                raise BadCheckpoint(
                    field=entry.hugging_face,
                    found=f"{loaded.dtype}{list(loaded.shape)}",
                    allowed=f"{self.dtype}{list(entry.shape)}",
                    reason="The contract's policy has this shape and dtype, and the engine never converts weights.",
                )
            for tensor in self._tensors[name]:
                target = tensor[entry.index] if entry.index else tensor
                target.copy_(loaded)
            self._missing[name] -= loaded.numel()

        return load


def _is_stacked(name: str) -> bool:
    """Whether the graphs read a parameter one row of its first axis at a time: a row a layer."""
    return name.startswith("layers.") or name == "norms"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, aligned: bool) -> torch.Tensor:
    """Zeros; where aligned, with the first axis padded so that each of its rows starts at an aligned address."""
    if not aligned:
        return torch.zeros(shape, dtype=dtype, device=device)
    unit = ROW_ALIGNMENT // dtype.itemsize
    row = math.prod(shape[1:])
    padded = torch.zeros(shape[0], -(-row // unit) * unit, dtype=dtype, device=device)
    return padded[:, :row].unflatten(1, shape[1:])


def _write(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    """Overwrites elements from flat index `start` on, row by row where rows are padded."""
    if tensor.is_contiguous():
        tensor.view(-1)[start : start + values.numel()].copy_(values)
        return
    rows = tensor.flatten(1)
    done = 0
    while done < values.numel():
        row, column = divmod(start + done, rows.shape[1])
        count = min(rows.shape[1] - column, values.numel() - done)
        rows[row, column : column + count].copy_(values[done : done + count])
        done += count


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The policy's own bits. Raises BadCheckpoint if a widened element is not one: then it was not only copied."""
    if tensor.dtype == dtype:
        return tensor
    words = tensor.view(torch.int32)
    if bool((words & 0xFFFF).any()):
        raise BadCheckpoint(
            field="weights", found="a widened element that is no bfloat16", allowed="bfloat16 values",
            reason="Something other than a weight update wrote to the engine's parameters.",
        )  # fmt: skip
    return (words >> 16).to(torch.int16)


def check_parameters(params: Mapping[str, Any], policy: Policy) -> None:
    """Raises BadCheckpoint unless these are exactly the policy's packed parameters, in name, shape and dtype."""
    found = {name: f"{value.dtype}{list(value.shape)}" for name, value in params.items()}
    wanted = {name: f"{shape.dtype}{list(shape.shape)}" for name, shape in policy.parameter_shapes.items()}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if wrong:
        raise BadCheckpoint(
            field=f"params[{', '.join(wrong)}]",
            found=[found.get(name, "missing") for name in wrong],
            allowed=[wanted.get(name, "no such parameter") for name in wrong],
            reason="A sync replaces all parameters by arrays of the same shape and dtype; the engine converts nothing.",
        )
