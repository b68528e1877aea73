"""Run a policy on a mesh: data parallel and fully sharded, inside of shard_map, with no float added across devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from contracts import AXES, ExecutionContract
from contracts.errors import MeshNotClaimed
from isojax.policy.policy import Parameters, Policy
from isojax.policy.sharded import spread

# Degrees of dp and of fsdp that the gate in tests/isojax/test_mesh.py runs, alone and together.
PROVED_DEGREES = (1, 2, 4, 8)
# The token axis is cut over both: fsdp is data parallelism that also cuts the parameters.
_BATCH_AXES = ("dp", "fsdp")


def mesh_degrees(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Degree by axis of a live mesh. Raises `MeshNotClaimed` for an axis that no contract knows."""
    for axis in mesh.axis_names:
        if axis not in AXES:
            raise MeshNotClaimed(
                field=f"mesh.{axis}",
                found=f"{axis}={mesh.shape[axis]}",
                allowed=f"axes {', '.join(AXES)}",
                reason="No claim is about this axis.",
            )
    return dict(mesh.shape)


def fits_fsdp(policy: Policy, degree: int) -> bool:
    """Whether every parameter can be cut into `degree` equal pieces along axis 1."""
    return all(shape.shape[1] % degree == 0 for shape in policy.parameter_shapes.values())


def parameter_specs(policy: Policy, mesh: Mesh | AbstractMesh) -> dict[str, PartitionSpec]:
    """How each parameter lies on the mesh: cut over fsdp along axis 1, whole on every other mesh axis.

    Axis 1 is the output axis of a stacked weight and the hidden axis of the embedding, the head and the norms.
    Raises `MeshNotClaimed` where a parameter does not divide.
    """
    degree = mesh.shape.get("fsdp", 1)
    if not fits_fsdp(policy, degree):
        raise MeshNotClaimed(
            field="mesh.fsdp",
            found=f"fsdp={degree}",
            allowed="a divisor of axis 1 of every parameter",
            reason="Ranks would hold unequal pieces.",
        )
    spec = PartitionSpec() if degree == 1 else PartitionSpec(None, "fsdp")
    return dict.fromkeys(policy.parameter_shapes, spec)


def batch_spec(mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """How the token axis lies on the mesh. Pack with `shards=` the product of these axes: no sequence may be cut."""
    return PartitionSpec(tuple(axis for axis in _BATCH_AXES if axis in mesh.axis_names))


def score_on_mesh(policy: Policy, mesh: Mesh, contract: ExecutionContract) -> Callable[..., jax.Array]:
    """`policy.score` over a mesh, to be jitted or differentiated by the caller; fp32 [T], cut like the batch.

    It is called with parameters, buffers, batch, temperature and, if any, the entropy probe, cut like the batch too.

    Each device computes its own sequences with whole weights: parameters cut over fsdp are gathered a layer at a time,
    which moves bits and adds none. The gradient of a parameter is summed over devices in fp32, cut as the parameter is.
    Raises `MeshNotClaimed` for a mesh outside of the contract's claims, before anything is compiled.
    """

    def local(params, buffers, batch, temperature, probe, *, gather_axis):
        return policy.score(params, buffers, batch, temperature, gather_axis=gather_axis, entropy_probe=probe)

    batch = batch_spec(mesh)
    mapped = _over_shards(local, policy, mesh, contract, (batch, PartitionSpec(), batch))
    return lambda params, buffers, batch, temperature, probe=None: mapped(params, buffers, batch, temperature, probe)


def rows_on_mesh(policy: Policy, mesh: Mesh, contract: ExecutionContract) -> Callable[..., jax.Array]:
    """Log-probabilities over the whole vocabulary of chosen rows, to be jitted by the caller; fp32 [R, V].

    It is called with parameters, buffers, batch, rows and temperature. rows: int32 [R], cut like the batch, every
    shard's own being indices into it. The result is cut the same. Raises as `score_on_mesh`.
    """

    def local(params, buffers, batch, rows, temperature, *, gather_axis):
        module = policy.module(params, gather_axis)
        hidden_TH = module.hidden(buffers["rope_table"], batch.tokens, batch.positions, batch.segment_ids)
        return policy.operations.log_prob_rows(
            hidden_TH[rows], module.head_VH, temperature, vocab_size=policy.config.vocab_size
        )

    batch = batch_spec(mesh)
    return _over_shards(local, policy, mesh, contract, (batch, batch, PartitionSpec()))


def _over_shards(
    local: Callable[..., jax.Array],
    policy: Policy,
    mesh: Mesh,
    contract: ExecutionContract,
    specs: tuple[PartitionSpec, ...],
) -> Callable[..., jax.Array]:
    """`local` on every shard of a batch, after parameters and buffers; specs: of its other arguments."""
    contract.check_mesh(mesh_degrees(mesh))
    gather_axis = "fsdp" if mesh.shape.get("fsdp", 1) > 1 else None
    rows = tuple(axis for axis in _BATCH_AXES if axis in mesh.axis_names)

    def run(params: Parameters, *arguments: Any) -> jax.Array:
        params = {name: spread(value, rows) for name, value in params.items()}
        return local(params, *arguments, gather_axis=gather_axis)

    in_specs = (parameter_specs(policy, mesh), PartitionSpec(), *specs)
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=batch_spec(mesh))
