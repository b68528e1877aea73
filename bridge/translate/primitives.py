"""The JAX primitives that only move data, and how each is written in torch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from bridge.arrays import torch_dtype
from bridge.translate.emit import Emitter, Value

Handler = Callable[[Emitter, Any, list[Value]], Sequence[Value] | None]
"""Takes the emitter, the equation and its operands; returns the results, or None for a form it does not cover."""

HANDLERS: dict[str, Handler] = {}

_COLUMN_OF = "column_of"
"""On a node that makes a column [N, 1] of ids [N], as gather wants them in JAX: the ids, which torch wants."""


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _is_exact(dtype: Any) -> bool:
    return np.dtype(dtype).kind in "iub"


@_handles("reshape")
def _reshape(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    if equation.params["dimensions"] is not None:
        return None
    return [emitter.reshape(emitter.node(operands[0]), equation.outvars[0].aval.shape)]


@_handles("squeeze")
def _squeeze(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return [emitter.reshape(emitter.node(operands[0]), equation.outvars[0].aval.shape, name="squeeze")]


@_handles("transpose")
def _transpose(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    order = list(equation.params["permutation"])
    return [emitter.call(torch.permute, emitter.node(operands[0]), order, name="permute")]


@_handles("rev")
def _reverse(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return [emitter.call(torch.flip, emitter.node(operands[0]), list(equation.params["dimensions"]), name="flip")]


@_handles("broadcast_in_dim")
def _broadcast(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    shape, kept = equation.outvars[0].aval.shape, equation.params["broadcast_dimensions"]
    source = equation.invars[0].aval.shape
    # First every dimension in its place, new ones of size 1, then the stretch.
    aligned = [source[kept.index(axis)] if axis in kept else 1 for axis in range(len(shape))]
    x = emitter.node(operands[0])
    if tuple(aligned) != tuple(source):
        column = emitter.reshape(x, aligned, name="unsqueeze")
        if tuple(aligned) == (*source, 1) and len(source) == 1:
            column.meta[_COLUMN_OF] = x
        x = column
    if tuple(aligned) != tuple(shape):
        x = emitter.call(torch.broadcast_to, x, emitter.dimensions.sizes(shape), name="broadcast")
    return [x]


def _cut(
    emitter: Emitter, x: fx.Node, shape: Sequence[Any], starts: Sequence[Any], ends: Sequence[Any], steps: Sequence[int]
) -> fx.Node:
    size = emitter.dimensions.size
    for axis, (whole, start, end, step) in enumerate(zip(shape, starts, ends, steps, strict=True)):
        if step != 1:
            x = emitter.call(torch.ops.aten.slice.Tensor, x, axis, size(start), size(end), step, name="slice")
        elif start != 0 or end != whole:
            x = emitter.call(torch.narrow, x, axis, size(start), size(end - start), name="narrow")
    return x


@_handles("slice")
def _slice(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    starts, ends = equation.params["start_indices"], equation.params["limit_indices"]
    steps = equation.params["strides"] or (1,) * len(starts)
    return [_cut(emitter, emitter.node(operands[0]), equation.invars[0].aval.shape, starts, ends, steps)]


@_handles("dynamic_slice")
def _dynamic_slice(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    shape, sizes = equation.invars[0].aval.shape, equation.params["slice_sizes"]
    constants = [start for start in operands[1:] if isinstance(start, np.ndarray)]
    if len(constants) != len(shape):
        return None
    starts = [
        min(max(int(start), 0), whole - length) if isinstance(whole, int) and isinstance(length, int) else int(start)
        for start, whole, length in zip(constants, shape, sizes, strict=True)
    ]
    ends = [start + length for start, length in zip(starts, sizes, strict=True)]
    return [_cut(emitter, emitter.node(operands[0]), shape, starts, ends, (1,) * len(starts))]


@_handles("split")
def _split(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    sizes, axis = emitter.dimensions.sizes(equation.params["sizes"]), equation.params["axis"]
    parts = emitter.call(torch.split, emitter.node(operands[0]), sizes, axis, name="split")
    return emitter.items(parts, [f"split_{index}" for index in range(len(sizes))])


@_handles("concatenate")
def _concatenate(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    parts = [emitter.node(operand) for operand in operands]
    return [emitter.call(torch.cat, parts, equation.params["dimension"], name="cat")]


@_handles("gather")
def _gather(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    """Whole rows along one axis: `x[ids]`, `jnp.take(x, ids, axis)`. torch raises for an id out of range."""
    if isinstance(operands[1], np.ndarray) and operands[1].ndim == 1:
        return _constant_gather(emitter, equation, operands)
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, ids_shape = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    if numbers.operand_batching_dims or len(numbers.start_index_map) != 1 or ids_shape[-1] != 1:
        return None
    axis, id_rank = numbers.start_index_map[0], len(ids_shape) - 1
    whole_rows = tuple(1 if index == axis else size for index, size in enumerate(shape))
    # The ids' own dimensions must take the axis' place, as index_select lays them out.
    offsets = tuple(range(axis)) + tuple(range(axis + id_rank, len(shape) - 1 + id_rank))
    if numbers.collapsed_slice_dims != (axis,) or tuple(sizes) != whole_rows or numbers.offset_dims != offsets:
        return None
    x, ids = map(emitter.node, operands)
    ids = ids.meta.get(_COLUMN_OF) or emitter.reshape(ids, (-1,), name="ids")
    source = emitter.viewed_input(x)
    rows = emitter.call(torch.index_select, x, axis, ids, name=f"{source}_rows" if source else "rows")
    return [rows if id_rank == 1 else emitter.reshape(rows, equation.outvars[0].aval.shape)]


def _constant_gather(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    """A slice that starts at a constant: how JAX writes `x[:, 2:5]` where the size of x is symbolic."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    constant = np.asarray(operands[1])
    if numbers.operand_batching_dims or numbers.offset_dims != tuple(range(len(result))):
        return None
    starts = [0] * len(shape)
    for axis, start in zip(numbers.start_index_map, constant.tolist(), strict=True):
        # Beyond the end JAX clamps or fills, by the gather's mode.
        if not isinstance(shape[axis], int) or not 0 <= start <= shape[axis] - sizes[axis]:
            return None
        starts[axis] = start
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    x = _cut(emitter, emitter.node(operands[0]), shape, starts, ends, (1,) * len(shape))
    return [emitter.reshape(x, result) if numbers.collapsed_slice_dims else x]


@_handles("stack")
def _stack(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return [emitter.call(torch.stack, list(map(emitter.node, operands)), equation.params["axis"], name="stack")]


@_handles("dim_as_value")
def _size_as_value(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    size, dtype = emitter.dimensions.size(equation.params["dim"]), torch_dtype(equation.outvars[0].aval.dtype)
    return [emitter.call(torch.full, [], size, dtype=dtype, device=emitter.device, name="size_value")]


@_handles("select_n")
def _select(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    if len(operands) != 3 or equation.invars[0].aval.dtype != np.bool_:
        return None
    if isinstance(operands[0], np.ndarray) and operands[0].ndim == 0:
        # JAX wraps even a constant index with a select.
        return [operands[1 + bool(operands[0])]]
    which, when_false, when_true = map(emitter.node, operands)
    return [emitter.call(torch.where, which, when_true, when_false, name="where")]


@_handles("iota")
def _iota(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    shape, axis = equation.outvars[0].aval.shape, equation.params["dimension"]
    if not _is_exact(equation.params["dtype"]):
        return None
    if len(shape) == 1 and isinstance(shape[0], int):
        return [np.arange(shape[0], dtype=equation.params["dtype"])]
    size, dtype = emitter.dimensions.size(shape[axis]), torch_dtype(equation.params["dtype"])
    x = emitter.call(torch.arange, size, dtype=dtype, device=emitter.device, name="arange")
    if len(shape) > 1:
        x = emitter.reshape(x, [shape[axis] if index == axis else 1 for index in range(len(shape))], "unsqueeze")
        x = emitter.call(torch.broadcast_to, x, emitter.dimensions.sizes(shape), name="broadcast")
    return [x]


@_handles("convert_element_type")
def _convert(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    new, old = np.dtype(equation.params["new_dtype"]), np.dtype(equation.invars[0].aval.dtype)
    if new == old:
        return [operands[0]]
    if not (_is_exact(new) and _is_exact(old)):
        return None
    if isinstance(operands[0], np.ndarray):
        return [operands[0].astype(new)]
    return [emitter.method("to", operands[0], torch_dtype(new), name="to")]


@_handles("copy", "copy_p", "optimization_barrier", "name", "stop_gradient", "pvary")
def _same(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value]:
    return operands


@_handles("pad")
def _pad(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    config = equation.params["padding_config"]
    if not isinstance(operands[1], np.ndarray) or any(low < 0 or high < 0 or inner for low, high, inner in config):
        return None
    # torch lists the last axis first.
    widths = [emitter.dimensions.size(width) for low, high, _ in reversed(config) for width in (low, high)]
    x, value = emitter.node(operands[0]), operands[1].item()
    return [emitter.call(torch.nn.functional.pad, x, widths, value=value, name="pad")]


# Exact on integers and booleans only: on floats they round or compare, and that belongs in a region.
_INTEGER_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (torch.add, np.add),
    "sub": (torch.sub, np.subtract),
    "mul": (torch.mul, np.multiply),
    "lt": (torch.lt, np.less),
    "le": (torch.le, np.less_equal),
    "gt": (torch.gt, np.greater),
    "ge": (torch.ge, np.greater_equal),
    "eq": (torch.eq, np.equal),
    "ne": (torch.ne, np.not_equal),
    "max": (torch.maximum, np.maximum),
    "min": (torch.minimum, np.minimum),
    "neg": (torch.neg, np.negative),
    "and": (torch.bitwise_and, np.bitwise_and),
    "or": (torch.bitwise_or, np.bitwise_or),
    "xor": (torch.bitwise_xor, np.bitwise_xor),
    "not": (torch.bitwise_not, np.bitwise_not),
}


@_handles(*_INTEGER_FUNCTIONS)
def _integer(emitter: Emitter, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
    name = equation.primitive.name
    kinds = {np.dtype(operand.aval.dtype).kind for operand in equation.invars}
    if not kinds <= set("biu"):
        return None
    in_torch, in_numpy = _INTEGER_FUNCTIONS[name]
    if all(isinstance(operand, np.ndarray) for operand in operands):
        return [np.asarray(in_numpy(*operands))]
    if isinstance(operands[0], np.ndarray) and name in ("add", "mul"):
        operands = operands[::-1]
    # A scalar constant stays a plain number in the printed graph, where torch takes one.
    plain = name not in ("max", "min")
    arguments = [
        operand.item()
        if plain and index and isinstance(operand, np.ndarray) and not operand.ndim
        else emitter.node(operand)
        for index, operand in enumerate(operands)
    ]
    return [emitter.call(in_torch, *arguments, name=name)]
