"""Where a policy's arrays lie: all of them on one device, unless `isojax.mesh_policy` cuts them over several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax
from jax.sharding import Sharding, SingleDeviceSharding

Tree = TypeVar("Tree")
Arrays = dict[str, jax.Array]


class Placement(Protocol):
    """What a trainer asks about devices; the answers for one and for many."""

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by mesh axis."""
        ...

    @property
    def rows(self) -> Sharding:
        """Of the [T] arrays of a packed batch."""
        ...

    def shardings(self, tree: Any) -> Any:
        """Of every array in a tree: the parameter's own where its name is the innermost key, whole anywhere else."""
        ...

    def pinned(self, tree: Tree) -> Tree:
        """The same tree inside of jit, which may then not place its results as it likes."""
        ...

    def by_piece(self, function: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        """A function of each parameter's elements alone, run by every device on its own pieces. Traceable."""
        ...

    def whole(self, params: Mapping[str, jax.Array]) -> Arrays:
        """Every parameter whole and on the first device: what an engine takes. Bits are moved, none changed."""
        ...


class OneDevice:
    """The first device holds everything. Implements `Placement`."""

    @property
    def degrees(self) -> dict[str, int]:
        """One of one."""
        return {"dp": 1}

    @property
    def rows(self) -> Sharding:
        """That device."""
        return SingleDeviceSharding(jax.devices()[0])

    def shardings(self, tree: Any) -> Any:
        """That device, for every array."""
        return jax.tree.map(lambda _: self.rows, tree)

    def pinned(self, tree: Tree) -> Tree:
        """The tree itself: there is no choice."""
        return tree

    def by_piece(self, function: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        """The function itself."""
        return function

    def whole(self, params: Mapping[str, jax.Array]) -> Arrays:
        """The parameters themselves."""
        return dict(params)
