"""Trains on a mesh of four virtual devices; prints what was equal as JSON and leaves one minibatch's gradients.

Runs in a process of its own, since the number of devices is fixed when JAX starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=4 python mesh_training.py SCRATCH`.
"""

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from reference_engine import one_bit_off
from rl_samples import leaf_bits, run_config, small_contract, small_engine, small_params, small_policy, small_trainer

from contracts.errors import Refusal
from isojax import Completion, MeshPolicy, Policy, digest, open_mesh, pack
from isojax.rl.check_rollout import check_rollout, score
from isojax.rl.learner import Learner
from isojax.rl.rollout import Sampling
from isojax.rl.trainer import Trainer

ALONE, SHARDED, BOTH = {"dp": 1, "fsdp": 1}, {"dp": 1, "fsdp": 4}, {"dp": 2, "fsdp": 2}
STEPS = 2
GRADIENTS = "gradients.npz"


def main(scratch: Path) -> None:
    first = trained(scratch / "first", BOTH, STEPS)
    pieces = jax.tree.leaves((first.learner.state, first.learner.params))
    found = {
        "scores": scores(scratch),
        "devices": sorted({len(piece.sharding.device_set) for piece in pieces}),
        "cut_in_two": sum(piece.addressable_shards[0].data.size * 2 == piece.size for piece in pieces),
        "parameters": len(small_params()),
        "last_digest": first.progress.weight_digest,
        "engine_has_the_weights": first.engine.weight_digest == digest(first.learner.params),
        "resumed": resumed(scratch / "resumed", first),
        "moved": {str(degrees): moved(scratch / "first", degrees, first) for degrees in (ALONE, SHARDED)},
        "refused": [refusal(partial(placed, degrees)) for degrees in ({"dp": 4, "fsdp": 2}, {"dp": 3, "fsdp": 1})],
        "cut": [refusal(partial(scored_in, length_multiple)) for length_multiple in (8, 5)],
    }
    print(json.dumps(found))


def scores(scratch: Path) -> dict[str, Any]:
    """What the engine is compared with, on the mesh; gradients go to a file, to be compared with one device's."""
    rollout, mesh = sampled(), learner(placed(BOTH))
    scored = score(mesh.policy, mesh.params, rollout, 1.0, 64)
    checked = check_rollout(mesh.policy, mesh.params, rollout, 1.0, 64)
    wrong = check_rollout(mesh.policy, mesh.params, [one_bit_off(rollout[0], 1), *rollout[1:]], 1.0, 64)
    found = minibatch(mesh, rollout)
    np.savez(scratch / GRADIENTS, **found.gradients)
    return {
        "start_digest": digest(mesh.params) == digest(small_params()),
        "tokens": sum(map(len, scored)),
        # The engine of these tests computes whole rows on the first device.
        "different": sum(one.tobytes() != two.log_probs.tobytes() for one, two in zip(scored, rollout, strict=True)),
        "full_rows": checked.full_rows,
        "exact": checked.exact and found.mismatch.exact and not found.parts.ratio_off_one,
        "planted": wrong.mismatch_tokens,
        "entropy": found.entropy,
    }


def minibatch(learner: Learner, rollout: list[Completion]) -> Any:
    """Gradients of the whole rollout, with advantages that differ."""
    advantages = np.linspace(-1, 1, len(rollout), dtype=np.float32)
    return learner._minibatch(rollout, list(range(len(rollout))), advantages, None)


def sampled() -> list[Completion]:
    """Sequences of several lengths, with full rows in every shard."""
    engine = small_engine()
    engine.sync(small_params())
    return engine.generate([[0, 1], [0, 2, 3, 4, 5]], Sampling(max_tokens=3, samples=4, seed=5), full_rows=7)


def placed(degrees: dict[str, int]) -> Policy:
    """One policy a mesh, compiled once."""
    return _placed(tuple(degrees.items()))


@cache
def _placed(degrees: tuple[tuple[str, int], ...]) -> Policy:
    mesh = open_mesh(dict(degrees))
    return small_policy() if mesh.size == 1 else MeshPolicy(small_policy(), mesh, small_contract())


def learner(policy: Policy) -> Learner:
    config = run_config()
    return Learner(
        policy,
        small_params(),
        optimizer=config.optimizer,
        algorithm=config.algorithm,
        temperature=1.0,
        micro_batch_tokens=64,
    )


def trainer_on(folder: Path, degrees: dict[str, int], steps: int) -> Trainer:
    return small_trainer(folder, run_config(train={"steps": steps, "mesh": degrees}), policy=placed(degrees))


def trained(folder: Path, degrees: dict[str, int], steps: int) -> Trainer:
    trainer = trainer_on(folder, degrees, steps)
    trainer.run(show_progress=False)
    return trainer


def resumed(folder: Path, finished: Trainer) -> bool:
    """Whether another run, stopped after a step and resumed, ends with the bits of the one that was not."""
    trained(folder, BOTH, 1).close()
    again = trainer_on(folder, BOTH, STEPS)
    again.resume()
    again.run(show_progress=False)
    return again.progress == finished.progress and leaf_bits(again.learner.state) == leaf_bits(finished.learner.state)


def moved(folder: Path, degrees: dict[str, int], finished: Trainer) -> bool:
    """Whether its last checkpoint has the same bits on other devices, weights for the engine included."""
    trainer = trainer_on(folder, degrees, STEPS)
    trainer.resume()
    return (
        leaf_bits(trainer.learner.state) == leaf_bits(finished.learner.state)
        and trainer.engine.weight_digest == finished.engine.weight_digest
    )


def scored_in(length_multiple: int) -> None:
    """Two sequences of six tokens in batches that were not packed for a mesh."""
    batch = pack([[0, 1, 2, 3, 4, 5]] * 2, length_multiple=length_multiple)
    placed(BOTH).log_probs(small_params(), batch)


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Refusal as error:
        return str(error)
    return "taken"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
