"""The gate of a mesh: what several devices compute together has the bits of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from contracts.errors import BadConfig, DifferenceFound
from isojax.contract import build_contract, require_claimable
from isojax.mesh_policy import MeshPolicy, open_mesh
from isojax.policy.policy import Policy
from isojax.rl.check_rollout import check_rollout, score
from isojax.rl.mismatch import Mismatch
from isojax.rl.optimizer import Parameters
from isojax.rl.packing import cut, fitting_lengths
from isojax.rl.rollout import Completion

LAYERS = 2
"""Of the policy: enough that weights are gathered anew, and no more memory than a check should take."""
SEQUENCES_A_SHARD = 3
UNSEALED_TOKENS = 512


def mesh_gate(policy: Policy, mesh: Mapping[str, int]) -> str:
    """Sampled tokens and full rows have one device's bits on the mesh and on each of its axes alone.

    policy: its weights are not needed; it launches what its kind of device launches. Raises DifferenceFound, and what
    `require_provable` does.
    """
    require_provable(policy, mesh)
    if all(degree == 1 for degree in mesh.values()):
        raise BadConfig(
            field="mesh", found=dict(mesh), allowed="a degree above 1", reason="There is nothing to compare."
        )
    wanted = {axis: degree for axis, degree in mesh.items() if degree > 1}
    shallow = _shallow(policy)
    params = shallow.init(jax.random.key(0), scale=0.1)
    found = []
    for degrees in _parts(wanted):
        on_mesh = placed(shallow, degrees)
        completions = completions_of(shallow, params, _lengths(shallow, on_mesh.shards), _capacity(shallow))
        name = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        pieces = jax.device_put(params, on_mesh.placement.shardings(params))
        seen = _compared(on_mesh, pieces, completions)
        if not seen.exact:
            raise _failed(
                name,
                f"{seen.mismatch_tokens} of {seen.tokens} tokens and {seen.full_row_mismatches} of {seen.full_rows} "
                "full rows differ",
                "0",
                str(seen.first),
            )
        if _compared(on_mesh, _spoiled(pieces), completions).exact:
            raise _failed(
                name, "no difference", "a difference", "The last device's weights were changed: this proves nothing."
            )
        found.append(f"{name}: {seen.tokens} tokens and {seen.full_rows} full rows")
    return f"{'; '.join(found)}; a changed weight on the last device was caught each time"


def require_provable(policy: Policy, mesh: Mapping[str, int]) -> None:
    """Refuse a mesh that cannot be proved here.

    Raises MeshNotClaimed for an axis or a degree that no gate runs and for weights that do not divide, and BadConfig
    for more devices than there are.
    """
    require_claimable(policy, mesh)
    open_mesh(mesh)


def _parts(mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """All meshes that claims of these degrees allow: each axis alone, and all together."""
    if len(mesh) > 1:
        yield from ({axis: degree} for axis, degree in mesh.items())
    yield dict(mesh)


def _shallow(policy: Policy) -> Policy:
    """The same policy with few layers, for the same kernels."""
    config = dataclasses.replace(policy.config, num_layers=min(LAYERS, policy.config.num_layers))
    rope = jax.device_get(policy.buffers["rope_table"])
    found = Policy(config, dtype=policy.dtype, remat=policy.remat, rope=rope)
    found.packing, found.row_buckets = policy.packing, policy.row_buckets
    return found


def placed(policy: Policy, degrees: Mapping[str, int]) -> MeshPolicy:
    """The policy on a mesh of these degrees, which nothing needs to have proved."""
    # What is proved here is in no card's contract yet, and without a claim no mesh is made. A CPU's contract claims all
    # that a gate could prove.
    return MeshPolicy(policy, open_mesh(degrees), build_contract(policy, tokenizer={}))


def _lengths(policy: Policy, shards: int) -> list[int]:
    """Of sequences, several for every shard."""
    longest = min(_capacity(policy) // 2, policy.config.max_position)
    some = np.random.default_rng(0).integers(2, longest, SEQUENCES_A_SHARD * shards, endpoint=True)
    return [longest, 2, *some.tolist()]


def completions_of(policy: Policy, params: Parameters, lengths: Sequence[int], capacity: int) -> list[Completion]:
    """Random sequences as an engine on one device would return them: every log-probability, and a full row of each.

    lengths: of prompt and completion together, 2 tokens or more. capacity: tokens of a micro-batch that scores them.
    """
    generator = np.random.default_rng(0)
    bare = []
    for index, length in enumerate(lengths):
        prompt, tokens = np.split(generator.integers(0, policy.config.vocab_size, length), [max(1, length // 4)])
        zeros = np.zeros(len(tokens), np.float32)
        bare.append(Completion(index, tuple(prompt.tolist()), tuple(tokens.tolist()), zeros, "length", ""))
    rows: dict[int, np.ndarray] = {}
    most = policy.row_buckets[-1] if policy.row_buckets else len(bare)
    for micro in cut(bare, range(len(bare)), capacity, policy.packing):
        last = np.array([rows_of_one[-1] for rows_of_one in micro.rows])
        for start in range(0, len(last), most):
            part = slice(start, start + most)
            values = np.asarray(policy.log_prob_rows(params, micro.batch, last[part]))
            rows |= dict(zip(micro.completions[part], values, strict=True))
    scored = score(policy, params, bare, 1.0, capacity)
    return [
        dataclasses.replace(one, log_probs=scored[index], rows={len(one.tokens) - 1: rows[index]})
        for index, one in enumerate(bare)
    ]


def _compared(on_mesh: MeshPolicy, pieces: Parameters, completions: Sequence[Completion]) -> Mismatch:
    return check_rollout(on_mesh, pieces, completions, 1.0, _capacity(on_mesh))


def _capacity(policy: Policy) -> int:
    """Tokens of a micro-batch on one device: the most that is sealed."""
    sealed = policy.packing["sealed_lengths"]
    return fitting_lengths(sealed[-1] if sealed else UNSEALED_TOKENS, policy.packing)[0]


def _spoiled(pieces: Parameters) -> Parameters:
    """One weight of a norm doubled, in what the last device holds and nowhere else."""

    def changed(whole: jax.Array) -> jax.Array:
        shards: list[Any] = [shard.data for shard in whole.addressable_shards]
        shards[-1] = shards[-1].at[0, -1].multiply(2)
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)

    return {**pieces, "norms": changed(pieces["norms"])}


def _failed(name: str, found: str, allowed: str, reason: str) -> DifferenceFound:
    return DifferenceFound(field=f"mesh {name}", found=found, allowed=allowed, reason=reason)
