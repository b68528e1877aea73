"""Several cards: each has its own sequences, one card's bits, and after an update the same weights as all others."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest

from isojax import Policy, digest
from isojax.evidence import small_policy
from isojax.evidence.mesh_gate import completions_of, placed
from isojax.kernels import packing_of
from isojax.rl.algorithms import GrpoSection
from isojax.rl.check_rollout import check_rollout, score
from isojax.rl.config import OptimizerSection
from isojax.rl.learner import Learner

LENGTHS = (700, 129, 64, 2, 300, 511, 40, 999, 8, 250)
CAPACITY = 2048
MESHES = ({"dp": 2}, {"fsdp": 2}, {"dp": 2, "fsdp": 2}, {"dp": 1, "fsdp": 4}, {"dp": 2, "fsdp": 4})


@cache
def _policy():
    # The shapes of the small bundle: a process that has loaded it runs no other kernels.
    policy = Policy(small_policy.CONFIG, remat="regions")
    policy.packing, policy.row_buckets = packing_of(small_policy.SHAPES), small_policy.SHAPES.head_rows
    return policy, small_policy.small_parameters(policy)


def _placed(degrees):
    count = int(np.prod(list(degrees.values())))
    if count > jax.device_count():
        pytest.skip(f"{degrees} needs {count} cards, found {jax.device_count()}")
    policy, params = _policy()
    on_mesh = placed(policy, degrees)
    return on_mesh, jax.device_put(params, on_mesh.placement.shardings(params))


@cache
def _completions():
    policy, params = _policy()
    held = digest(params)
    found = completions_of(policy, params, LENGTHS, CAPACITY)
    return tuple(dataclasses.replace(one, weight_digest=held) for one in found)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_a_mesh_gives_one_cards_bits(degrees):
    on_mesh, pieces = _placed(degrees)
    found = check_rollout(on_mesh, pieces, _completions(), 1.0, CAPACITY)
    assert (found.tokens, found.full_rows) == (sum(len(one.tokens) for one in _completions()), len(LENGTHS))
    assert found.exact, found.first
    assert digest(pieces) == digest(_policy()[1])


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_weights_after_an_update_are_the_same_on_one_card_and_on_all(degrees):
    on_mesh, _ = _placed(degrees)
    mesh, alone = (_learner(policy) for policy in (on_mesh, _policy()[0]))
    advantages = np.linspace(-1, 1, len(LENGTHS), dtype=np.float32)
    results = [learner.update(_completions(), advantages, None, require_exact=True) for learner in (mesh, alone)]
    whole = mesh.whole_params()
    assert digest(whole) == digest(mesh.params) != digest(_policy()[1])
    # Scored by one card with the gathered weights, and by all with their pieces.
    bare = [dataclasses.replace(one, rows=None) for one in _completions()]
    left = score(_policy()[0], whole, bare, 1.0, CAPACITY)
    right = score(on_mesh, mesh.params, bare, 1.0, CAPACITY)
    assert [one.tobytes() for one in left] == [one.tobytes() for one in right]
    norms = [result.gradient_norm for result in results]
    print(degrees, "gradient norms", norms, "entropies", [result.entropy for result in results], flush=True)
    # bfloat16 gradients, rounded in every shard.
    assert norms[0] == pytest.approx(norms[1], rel=2**-6)
    assert results[0].entropy == pytest.approx(results[1].entropy, rel=1e-5)


def _learner(policy):
    return Learner(
        policy,
        _policy()[1],
        optimizer=OptimizerSection(learning_rate=1e-3),
        algorithm=GrpoSection(),
        temperature=1.0,
        micro_batch_tokens=CAPACITY,
    )
