"""Runs the gate of a mesh on two virtual devices, right and with faults; prints what it says, as JSON.

In a process of its own, since the number of devices is fixed when JAX starts:
`XLA_FLAGS=--xla_force_host_platform_device_count=2 python mesh_gate_faults.py`.
"""

import json
from functools import cache
from unittest import mock

import numpy as np
from policy_samples import tiny_policy

from contracts import FrozenMap
from contracts.errors import IsojaxError
from isojax.evidence import mesh_gate
from isojax.mesh_policy import MeshPolicy


def main() -> None:
    policy, _ = tiny_policy()
    policy.row_buckets = (4,)
    mesh_gate.UNSEALED_TOKENS, mesh_gate.SEQUENCES_A_SHARD = 64, 1
    # Compiled once for all that follows.
    mesh_gate._shallow = cache(mesh_gate._shallow)
    placed = cache(mesh_gate.placed)
    mesh_gate.placed = lambda shallow, degrees: placed(shallow, FrozenMap(degrees))
    found = {"right": said(policy, {"dp": 1, "fsdp": 2})}
    found["more than there are"] = said(policy, {"dp": 4})
    found["one device"] = said(policy, {"dp": 1})
    found["not claimable"] = said(policy, {"tp": 2})
    with patched(MeshPolicy, "log_probs", last_bit):
        found["a token"] = said(policy, {"fsdp": 2})
    with patched(MeshPolicy, "log_prob_rows", last_bit):
        found["a row"] = said(policy, {"fsdp": 2})
    with patched(mesh_gate, "_spoiled", lambda _: lambda pieces: pieces):
        found["nothing planted"] = said(policy, {"fsdp": 2})
    print(json.dumps(found))


def said(policy, mesh) -> str:
    try:
        return mesh_gate.mesh_gate(policy, mesh)
    except IsojaxError as error:
        return f"{type(error).__name__}: {error}"


def last_bit(original):
    """The same result with the lowest bit of every value flipped."""

    def lying(*arguments, **keywords):
        values = np.array(original(*arguments, **keywords))
        values.view(np.int32)[...] ^= 1
        return values

    return lying


def patched(owner, name, make):
    """For a block, an attribute of `owner` is what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


if __name__ == "__main__":
    main()
