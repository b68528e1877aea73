"""Scores one batch on many meshes of eight virtual devices and on one device; prints how many bits differ, as JSON.

Runs in a process of its own, since the number of devices is fixed when JAX starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_gate.py`.
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from policy_samples import bits, random_sequences, rows_of, tiny_policy

from contracts import parse_mesh
from isojax import build_contract, pack, score_on_mesh
from isojax.audit import audit
from isojax.mesh import batch_spec, parameter_specs
from isojax.policy import Parameters, Policy

MESHES = ("dp=2", "dp=4", "dp=8", "fsdp=2", "fsdp=4", "fsdp=8", "dp=2,fsdp=4,tp=1")
SEQUENCES = random_sequences(5, 3, 7, 31, 18, 9, 1, 26, 14, 12)


def main() -> None:
    policy, params = tiny_policy()
    contract = build_contract(policy, tokenizer={})
    alone = pack(SEQUENCES)
    expected = np.asarray(policy.log_probs(params, alone))
    gradients = jax.jit(jax.grad(lambda params: total(policy.score(params, policy.buffers, alone), alone.mask)))(params)
    single = audit(policy.score, params, policy.buffers, alone, jnp.float32(1))
    found = {}
    for name in MESHES:
        degrees = parse_mesh(name)
        count = int(np.prod(list(degrees.values())))
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(*degrees.values()), tuple(degrees))
        step = MeshStep(policy, params, mesh, score_on_mesh(policy, mesh, contract))
        report = audit(step.score, step.params, *step.rest, mesh=mesh)
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
        }
        if len(degrees) > 1:
            found[name]["gradient_error"] = largest_error(step.gradients(), gradients)
    print(json.dumps(found))


class MeshStep:
    """One batch and the parameters, placed on a mesh."""

    def __init__(self, policy: Policy, params: Parameters, mesh: Mesh, score: Callable[..., jax.Array]) -> None:
        specs = parameter_specs(policy, mesh)
        self.score = score
        self.params = {key: jax.device_put(value, NamedSharding(mesh, specs[key])) for key, value in params.items()}
        shards = mesh.shape.get("dp", 1) * mesh.shape.get("fsdp", 1)
        self.batch = pack(SEQUENCES, length_multiple=16, shards=shards)
        placed = jax.device_put(self.batch, NamedSharding(mesh, batch_spec(mesh)))
        self.rest = (policy.buffers, placed, jnp.float32(1))

    def gradients(self) -> Parameters:
        return jax.jit(jax.grad(lambda params: total(self.score(params, *self.rest), self.batch.mask)))(self.params)


def largest_error(found: Parameters, expected: Parameters) -> float:
    """Largest difference of a gradient, as a share of its parameter's largest gradient."""

    def error(name: str) -> float:
        left, right = (np.asarray(gradients[name], np.float32) for gradients in (found, expected))
        return float(np.abs(left - right).max() / np.abs(right).max())

    return max(error(name) for name in expected)


def total(rows: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, rows, 0.0))


if __name__ == "__main__":
    main()
