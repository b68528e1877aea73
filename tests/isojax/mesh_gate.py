"""Scores one batch on many meshes of eight virtual devices and on one device; prints how many bits differ, as JSON.

Runs in a process of its own, since the number of devices is fixed when JAX starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_gate.py`.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from policy_samples import bits, random_sequences, rows_of, tiny_policy

from contracts import parse_mesh
from isojax import build_contract, pack, score_on_mesh
from isojax.audit import audit
from isojax.mesh import batch_spec, parameter_specs
from isojax.policy import PackedBatch, Parameters, Policy

MESHES = ("dp=2", "dp=4", "dp=8", "fsdp=2", "fsdp=4", "fsdp=8", "dp=2,fsdp=4,tp=1")
SEQUENCES = random_sequences(5, 3, 7, 31, 18, 9, 1, 26, 14, 12)


def main() -> None:
    policy, params = tiny_policy()
    contract = build_contract(policy, tokenizer={})
    alone = pack(SEQUENCES)
    (_, expected), gradients = with_gradients(policy.score, alone)(params, policy.buffers, alone, jnp.float32(1))
    single = audit(policy.score, params, policy.buffers, alone, jnp.float32(1))
    found = {}
    for name in MESHES:
        degrees = parse_mesh(name)
        count = int(np.prod(list(degrees.values())))
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(*degrees.values()), tuple(degrees))
        step = MeshStep(policy, params, mesh, score_on_mesh(policy, mesh, contract))
        report = audit(step.score, step.params, *step.rest, mesh=mesh)
        gradient_error = 0.0
        if len(degrees) > 1:
            (_, rows), found_gradients = with_gradients(step.score, step.batch)(step.params, *step.rest)
            gradient_error = largest_error(found_gradients, gradients)
        else:
            rows = jax.jit(step.score)(step.params, *step.rest)
        found[name] = {
            "rows": sum(len(sequence) for sequence in SEQUENCES),
            "different": sum(
                int((bits(rows_of(step.batch, rows, i)) != bits(rows_of(alone, expected, i))).sum())
                for i in range(len(SEQUENCES))
            ),
            "devices": len(rows.sharding.device_set),
            "same_regions": report.sequence == single.sequence,
            "gathers": report.moves.get("all_gather", 0),
            "gradient_error": gradient_error,
        }
    print(json.dumps(found))


class MeshStep:
    """One batch and the parameters, placed on a mesh."""

    def __init__(self, policy: Policy, params: Parameters, mesh: Mesh, score: Callable[..., jax.Array]) -> None:
        specs = parameter_specs(policy, mesh)
        self.score = score
        # From the host, where cutting an array compiles nothing.
        self.params = {
            key: jax.device_put(np.asarray(value), NamedSharding(mesh, specs[key])) for key, value in params.items()
        }
        shards = mesh.shape.get("dp", 1) * mesh.shape.get("fsdp", 1)
        self.batch = pack(SEQUENCES, length_multiple=16, shards=shards)
        placed = jax.device_put(self.batch, NamedSharding(mesh, batch_spec(mesh)))
        self.rest = (policy.buffers, placed, jnp.float32(1))


def largest_error(found: Parameters, expected: Parameters) -> float:
    """Largest difference of a gradient, as a share of its parameter's largest gradient."""

    def error(name: str) -> float:
        left, right = (np.asarray(gradients[name], np.float32) for gradients in (found, expected))
        return float(np.abs(left - right).max() / np.abs(right).max())

    return max(error(name) for name in expected)


def with_gradients(score: Callable[..., jax.Array], batch: PackedBatch) -> Callable[..., Any]:
    """Of the summed log-probabilities: ((sum, rows), gradients), jitted."""

    def loss(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        rows = score(*arguments)
        return jnp.sum(jnp.where(batch.mask, rows, 0.0)), rows

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


if __name__ == "__main__":
    main()
