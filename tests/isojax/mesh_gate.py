"""Scores one batch on many meshes of eight virtual devices and on one device; prints how many bits differ, as JSON.

Runs in a process of its own, since the number of devices is fixed when JAX starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python mesh_gate.py`.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from policy_samples import bits, random_sequences, rows_of, tiny_policy

from contracts import parse_mesh
from isojax import audit, build_contract, pack, score_on_mesh
from isojax.mesh import batch_spec, parameter_specs

MESHES = ("dp=1", "dp=2", "dp=4", "dp=8", "fsdp=2", "fsdp=4", "fsdp=8", "dp=2,fsdp=4", "dp=4,fsdp=2,tp=1")
SEQUENCES = random_sequences(5, 3, 7, 31, 18, 9, 1, 26, 14, 12)


def main() -> None:
    policy, params = tiny_policy()
    contract = build_contract(policy, tokenizer={})
    alone = pack(SEQUENCES)
    expected = policy.log_probs(params, alone)
    gradients = jax.jit(jax.grad(lambda params: total(policy.score(params, policy.buffers, alone), alone.mask)))(params)
    found = {}
    for name in MESHES:
        degrees = parse_mesh(name)
        devices = np.array(jax.devices()[: int(np.prod(list(degrees.values())))]).reshape(*degrees.values())
        mesh = Mesh(devices, tuple(degrees))
        score = score_on_mesh(policy, mesh, contract)
        specs = parameter_specs(policy, mesh)
        placed = {key: jax.device_put(value, NamedSharding(mesh, specs[key])) for key, value in params.items()}
        batch = pack(SEQUENCES, length_multiple=16, shards=degrees.get("dp", 1) * degrees.get("fsdp", 1))
        arguments = (
            placed,
            policy.buffers,
            jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh))),
            jnp.float32(1),
        )
        report = audit(score, *arguments, mesh=mesh)
        rows = jax.jit(score)(*arguments)
        found[name] = {
            "rows": sum(len(sequence) for sequence in SEQUENCES),
            "different": sum(
                int((bits(rows_of(batch, rows, i)) != bits(rows_of(alone, expected, i))).sum())
                for i in range(len(SEQUENCES))
            ),
            "devices": len(rows.sharding.device_set),
            "sequence": report.sequence,
            "gathers": report.moves.get("all_gather", 0),
        }
        if name == "dp=2,fsdp=4":
            step = jax.jit(jax.grad(lambda params: total(score(params, *arguments[1:]), batch.mask)))
            found[name]["gradient_error"] = max(
                float(jnp.abs(value.astype(jnp.float32) - gradients[key].astype(jnp.float32)).max())
                / float(jnp.abs(gradients[key].astype(jnp.float32)).max())
                for key, value in step(placed).items()
            )
    print(json.dumps(found))


def total(rows: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, rows, 0.0))


if __name__ == "__main__":
    main()
