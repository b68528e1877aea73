"""A region's kernels for a card: steps in a fixed order over named buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Shape and dtype of one dense row-major buffer in device memory.

    ``leading_at_most`` says that the first size is only a bound: a buffer with fewer of them serves as well, because
    the kernels address no others than those that other operands name, and no step or stride depends on their number.
    """

    shape: tuple[int, ...]
    dtype: str
    leading_at_most: bool = False

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Step:
    """One kernel launch: reads the named operands, writes the named results.

    ``kernel`` takes one array an operand and returns a tuple with one array a result; it must contain exactly one
    Mosaic GPU kernel and nothing else, since only that kernel's module is sealed. ``views`` gives, for a buffer that
    the kernel sees in another shape than the program declares, that shape: the same elements, dense and row-major, or
    only the first of an operand's elements.
    """

    name: str
    kernel: Callable[..., Sequence[jax.Array]]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    views: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def seen(self, name: str, buffer: Buffer) -> Buffer:
        """The buffer as this step's kernel sees it."""
        return dataclasses.replace(buffer, shape=self.views.get(name, buffer.shape))


@dataclasses.dataclass(frozen=True)
class Program:
    """All kernels of one region for one set of shapes and constants, and every buffer that they touch.

    A step's result that is also its operand is that buffer written in place, only where the kernel says so.
    ``buffers`` holds operands, results and scratch. Scratch is whatever is neither; no kernel may rely on its contents
    before a step of the same program wrote them.
    """

    buffers: dict[str, Buffer]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        written = set(self.operands)
        for step in self.steps:
            for name in (*step.operands, *step.results):
                if name not in self.buffers:
                    raise ValueError(f"step {step.name} names buffer {name!r}, which the program does not declare")
            for name, shape in step.views.items():
                seen, size = step.seen(name, self.buffers[name]).size, self.buffers[name].size
                if seen > size or (name in step.results and seen != size):
                    raise ValueError(f"step {step.name} views {name} as {shape}, which has another number of elements")
            missing = [name for name in step.operands if name not in written]
            if missing:
                raise ValueError(f"step {step.name} reads {missing} before anything wrote them")
            written.update(step.results)
        unwritten = [name for name in self.results if name not in written]
        if unwritten:
            raise ValueError(f"no step writes the results {unwritten}")

    @property
    def scratch(self) -> tuple[str, ...]:
        outside = {*self.operands, *self.results}
        return tuple(name for name in self.buffers if name not in outside)

    def run(self, *arguments: Any) -> tuple[jax.Array, ...]:
        """Runs the steps through JAX, as in the GPU interpreter; the sealed route goes through `store` instead.

        Of a buffer that a step writes in place only what the step wrote is meaningful.
        """
        values = dict(zip(self.operands, arguments, strict=True))
        for step in self.steps:
            seen = [step.seen(name, self.buffers[name]).shape for name in step.operands]
            operands = (_first(values[name], shape) for name, shape in zip(step.operands, seen, strict=True))
            outputs = step.kernel(*operands)
            for name, output in zip(step.results, outputs, strict=True):
                values[name] = output.reshape(self.buffers[name].shape)
        return tuple(values[name] for name in self.results)


def _first(value: Any, shape: tuple[int, ...]) -> Any:
    """The first elements of ``value``, as many as ``shape`` has, in that shape."""
    count = int(np.prod(shape, dtype=np.int64))
    return value.reshape(-1)[:count].reshape(shape)
