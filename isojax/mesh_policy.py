"""A policy on a mesh: parameters in pieces, batches in shards, and every log-probability with one device's bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, tree_map_with_path

from contracts import ExecutionContract
from contracts.errors import BadConfig
from isojax.kernels.packing import Packing
from isojax.mesh import batch_spec, mesh_degrees, parameter_specs, rows_on_mesh, score_on_mesh
from isojax.policy.batch import PackedBatch
from isojax.policy.placement import Arrays, Tree
from isojax.policy.policy import Parameters, Policy

# T: tokens, R: selected rows, S: shards, V: vocabulary.


def open_mesh(degrees: Mapping[str, int]) -> Mesh:
    """The first devices of this process as a mesh of these axes, the last axis innermost.

    Raises `BadConfig` where there are fewer devices than the degrees' product.
    """
    # Of Python's integers: a product of NumPy's may overflow to a number that fits.
    count = math.prod(degrees.values())
    devices = jax.local_devices()
    if count > len(devices):
        asked = ", ".join(f"{axis} = {degree}" for axis, degree in degrees.items())
        raise BadConfig(
            field="train.mesh",
            found=f"{asked}: {count} devices",
            allowed=f"at most the {len(devices)} of this process",
            reason=f"Each device holds a part of its own; the first one is a {devices[0].device_kind}.",
        )
    return Mesh(np.array(devices[:count]).reshape(*degrees.values()), tuple(degrees))


class MeshPolicy(Policy):
    """The same policy over a mesh: its `packing` has shards, and scoring and gradients run on all devices.

    Parameters go in as `placement.shardings` has them. `hidden` and `head_rows` stay the forms of one device.
    """

    def __init__(self, policy: Policy, mesh: Mesh, contract: ExecutionContract) -> None:
        """Raises `MeshNotClaimed` for a mesh outside of the contract's claims, before anything is compiled."""
        super().__init__(
            policy.config,
            dtype=policy.dtype,
            remat=policy.remat,
            rope=jax.device_get(policy.buffers["rope_table"]),
            operations=policy.operations,
        )
        self._alone, self.mesh = policy, mesh
        self._score_on_mesh = score_on_mesh(policy, mesh, contract)
        self._rows_on_mesh = rows_on_mesh(policy, mesh, contract)
        self.placement = MeshPlacement(mesh, parameter_specs(policy, mesh))
        self.buffers = jax.device_put(policy.buffers, NamedSharding(mesh, PartitionSpec()))
        self.row_buckets = policy.row_buckets
        self.shards = mesh.shape.get("dp", 1) * mesh.shape.get("fsdp", 1)
        self.packing = Packing(**policy.packing, shards=self.shards)

    @property
    def on_one_device(self) -> Policy:
        """The policy that is cut here; it takes whole parameters."""
        return self._alone

    def score(
        self,
        params: Parameters,
        buffers: Mapping[str, jax.Array],
        batch: PackedBatch,
        temperature: jax.Array | float = 1.0,
        *,
        gather_axis: str | None = None,
        entropy_probe: jax.Array | None = None,
    ) -> jax.Array:
        """As `Policy.score`, over the mesh. gather_axis: what the mesh says, and nothing else."""
        assert gather_axis is None
        return self._score_on_mesh(params, buffers, batch, jnp.asarray(temperature, jnp.float32), entropy_probe)

    def _check_batch(self, batch: PackedBatch) -> None:
        super()._check_batch(batch)
        rows, rest = divmod(len(batch.tokens), self.shards)
        known = isinstance(batch.positions, np.ndarray) and not rest
        # At its piece's first row a sequence that is not cut has position 0, and so has padding.
        cut = np.flatnonzero(batch.positions[::rows]) * rows if known else np.empty(0)
        if rest or cut.size:
            raise BadConfig(
                field="batch.positions",
                found=f"{len(batch.tokens)} rows" if rest else f"a sequence that is cut at row {cut[0]}",
                allowed=f"{self.shards} pieces of equal length, no sequence in two: isojax.pack(..., **policy.packing)",
                reason="A device computes what lies in its own piece, and would take the rest of a sequence for all.",
            )

    def _row_values(self, params: Parameters, batch: PackedBatch, rows: np.ndarray, temperature: Any) -> jax.Array:
        """Every shard computes the rows that lie in it, padded to the most that one has."""
        shard, local = np.divmod(rows, len(batch.tokens) // self.shards)
        counts = np.bincount(shard, minlength=self.shards)
        bucket = self._row_bucket(int(counts.max()))
        wanted_SR = np.zeros((self.shards, bucket), np.int32)
        order = np.argsort(shard, kind="stable")
        # Of each row, how many of the same shard came before it.
        place = np.empty(len(rows), np.int64)
        place[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        wanted_SR[shard, place] = local
        found_RV = self._rows(dict(params), self.buffers, batch, wanted_SR.reshape(-1), temperature)
        return found_RV[shard * bucket + place]

    @cached_property
    def _score(self) -> Callable[..., jax.Array]:
        return jax.jit(self.score, in_shardings=self._in_shardings(batches=1))

    @cached_property
    def _rows(self) -> Callable[..., jax.Array]:
        return jax.jit(self._rows_on_mesh, in_shardings=self._in_shardings(batches=2))

    def _in_shardings(self, batches: int) -> tuple[Any, ...]:
        """Of parameters, buffers, so many things that are cut like a batch, and the temperature."""
        params = self.placement.shardings(self.parameter_shapes)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return params, whole, *[self.placement.rows] * batches, whole


class MeshPlacement:
    """Parameters cut over fsdp and batches over dp and fsdp. Implements `Placement`."""

    def __init__(self, mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> None:
        """specs: of the parameters by name, as `isojax.mesh.parameter_specs` gives them."""
        self.mesh, self.specs = mesh, dict(specs)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by mesh axis."""
        return mesh_degrees(self.mesh)

    @property
    def rows(self) -> NamedSharding:
        """Cut over every axis that has data of its own."""
        return NamedSharding(self.mesh, batch_spec(self.mesh))

    def shardings(self, tree: Any) -> Any:
        """A parameter's pieces wherever its name is the innermost key: master weights, moments, gradients, copies."""

        def of(path: tuple[Any, ...], _: Any) -> NamedSharding:
            names = [key.key for key in path if isinstance(key, DictKey)]
            return NamedSharding(self.mesh, self.specs.get(names[-1], PartitionSpec()) if names else PartitionSpec())

        return tree_map_with_path(of, tree)

    def pinned(self, tree: Tree) -> Tree:
        """The tree, cut as `shardings` says."""
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def by_piece(self, function: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        """The function inside of shard_map: a region that were cut automatically would get the whole array."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=(self.specs,), out_specs=self.specs)

    def whole(self, params: Mapping[str, jax.Array]) -> Arrays:
        """Gathered onto the mesh's first device."""
        return jax.device_put(dict(params), self.mesh.devices.flat[0])
