"""One torch custom op a region, `torch.ops.isojax.<region>`, made from the region's declaration."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import torch

import pallas_kernels  # noqa: F401  (importing it declares the regions)
from bridge.arrays import integer_view, jax_dtype, shared_views, to_torch, torch_dtype
from bridge.jax_api import cpu_device
from bridge.kernel_launchers import LAUNCHERS
from pallas_kernels import counters
from pallas_kernels.region import REGIONS, Parameter, Region

NAMESPACE = "isojax"

STATIC_OPERANDS: dict[str, np.dtype] = {"layer": np.dtype("int32")}
"""Operands that are scalar arrays in JAX, where they come out of a scan, and plain integers in the unrolled graph."""

_SCHEMA_TYPES: dict[type, str] = {int: "int", float: "float", bool: "bool", str: "str"}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def operand_name(declared: str) -> str:
    """The name of a declared operand without the mark of an optional one."""
    return declared.removesuffix("?")


def schema_of(region: Region) -> str:
    """The torch schema: operands in order, optional ones with default None, then the parameters by keyword.

    For example `matmul(Tensor x, Tensor w, Tensor? bias=None, *, int leaves, str out_dtype) -> Tensor`. An operand
    that the region updates is written in place and is no result.
    """
    arguments = []
    for declared in region.operands:
        name = operand_name(declared)
        if name in STATIC_OPERANDS:
            arguments.append(f"int {name}")
        elif name in region.updates:
            arguments.append(f"Tensor({'abcdef'[region.updates.index(name)]}!) {name}")
        else:
            arguments.append(f"Tensor? {name}=None" if declared.endswith("?") else f"Tensor {name}")
    if region.parameters:
        arguments.append("*")
        arguments += [f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in region.parameters.items()]
    results = ", ".join("Tensor" for _ in region.returned)
    return f"{region.name}({', '.join(arguments)}) -> {results if len(region.returned) == 1 else f'({results})'}"


def op_of(region: Region) -> Callable[..., Any]:
    """The registered op of a region; registers it on first use."""
    _register(region)
    return getattr(getattr(torch.ops, NAMESPACE), region.name).default


@cache
def _register(region: Region) -> None:
    _library.define(schema_of(region))
    _library.impl(region.name, _cpu_implementation(region), "CPU")
    _library.impl(region.name, _cuda_implementation(region), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{region.name}", _fake_implementation(region), lib=_library)


@cache
def compiled(region: Region, parameters: tuple[tuple[str, Parameter], ...]) -> Callable[..., Any]:
    """The jitted region for one set of parameters; JAX keeps one executable per operand shapes inside it."""
    keywords = dict(parameters)
    return jax.jit(lambda *operands: region.primitive.bind(*operands, **keywords))


@cache
def _static_operand(name: str, value: int) -> jax.Array:
    return jax.device_put(np.asarray(value, STATIC_OPERANDS[name]), cpu_device())


def given_operands(region: Region, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands up to the last one that is not None; raises TypeError for a gap before it."""
    count = len(operands)
    while count and operands[count - 1] is None:
        count -= 1
    if any(operand is None for operand in operands[:count]):
        raise TypeError(f"region {region.name}: of its optional operands a later one is given without an earlier one")
    return operands[:count]


def result_tensors(region: Region, operands: Sequence[Any], parameters: dict[str, Parameter]) -> list[Any]:
    """Shape and torch dtype of every result but updates, from the region's own shape rule; sizes may be SymInts."""
    types = [
        ((), STATIC_OPERANDS[operand_name(declared)])
        if isinstance(operand, int)
        else (tuple(operand.shape), jax_dtype(operand.dtype))
        for declared, operand in zip(region.operands, operands, strict=False)
    ]
    results = region.result_types(*types, **parameters)[: len(region.returned)]
    return [(shape, torch_dtype(dtype)) for shape, dtype in results]


def _cpu_implementation(region: Region) -> Callable[..., Any]:
    static = [(index, name) for index, name in enumerate(map(operand_name, region.operands)) if name in STATIC_OPERANDS]
    returned = len(region.returned)
    updated = [region.operands.index(name) for name in region.updates]
    find = shared_views.to_jax

    def run(*operands: Any, **parameters: Parameter) -> Any:
        arguments = list(given_operands(region, operands))
        for index, name in static:
            arguments[index] = _static_operand(name, arguments[index])
        for index, operand in enumerate(arguments):
            if isinstance(operand, torch.Tensor):
                if operand.requires_grad and torch.is_grad_enabled():
                    raise NotImplementedError(
                        f"torch.ops.{NAMESPACE}.{region.name} has no torch gradient; differentiate the JAX policy, "
                        "or run the engine under torch.no_grad()"
                    )
                arguments[index] = find(operand)
        counters.record_served(region.name)
        results = compiled(region, tuple(parameters.items()))(*arguments)
        if updated:
            _write_changes([operands[index] for index in updated], [to_torch(x) for x in results[returned:]])
        return to_torch(results[0]) if returned == 1 else tuple([to_torch(result) for result in results[:returned]])

    return run


def _write_changes(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes the elements that differ, and no others: two targets may be views that overlap, as those of a cache do."""
    integers = [(integer_view(target), integer_view(value)) for target, value in zip(targets, values, strict=True)]
    changes = [before != after for before, after in integers]
    for (before, after), changed in zip(integers, changes, strict=True):
        before[changed] = after[changed]


def _cuda_implementation(region: Region) -> Callable[..., Any]:
    returned = len(region.returned)

    def run(*operands: Any, **parameters: Parameter) -> Any:
        tensors = [operand for operand in given_operands(region, operands) if not isinstance(operand, int)]
        results = LAUNCHERS.launch(region.name, tensors, parameters)
        return results[0] if returned == 1 else results[:returned]

    return run


def _fake_implementation(region: Region) -> Callable[..., Any]:
    def run(*operands: Any, **parameters: Parameter) -> Any:
        arguments = given_operands(region, operands)
        device = next(operand.device for operand in arguments if isinstance(operand, torch.Tensor))
        results = tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in result_tensors(region, arguments, parameters)
        )
        return results[0] if len(results) == 1 else results

    return run


def register_all() -> None:
    """Registers the ops of every declared region; importing this module has done it for those of `pallas_kernels`."""
    for region in tuple(REGIONS.values()):
        _register(region)


register_all()
