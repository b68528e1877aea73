"""What a run's two sides must agree on before anything is sampled: the contract, or nothing in the baseline arm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from contracts import ExecutionContract, bits_float, handshake
from contracts.errors import BadConfig
from isojax.policy.policy import Policy
from isojax.rl.config import Config
from isojax.rl.rollout import RolloutEngine

NO_IDENTITY = "native"
"""Stands where a run's numerical policy would: the native arm has none."""


class Agreement(NamedTuple):
    """temperature: as both sides hold it, rounded to float32 once. numerical_policy: the contract's identity, or
    `NO_IDENTITY`."""

    temperature: float
    numerical_policy: str


def agree(config: Config, policy: Policy, contract: ExecutionContract | None, engine: RolloutEngine) -> Agreement:
    """Checks mesh and handshake of the exact arm; the native arm, which has no contract, claims nothing.

    Raises BadConfig where configuration, policy and contract are not of one arm or differ in temperature, and what
    `contract.check_mesh` and `contracts.handshake` raise.
    """
    arms = {"policy": policy.arm, "contract": "native" if contract is None else "exact"}
    if set(arms.values()) != {config.policy.arm}:
        raise BadConfig(
            field="policy.arm",
            found=config.policy.arm,
            allowed=", ".join(f"{name}: {arm}" for name, arm in arms.items()),
            reason="The two arms are never mixed: one has a policy with regions and a contract, the other neither.",
        )
    if contract is None:
        return Agreement(float(np.float32(config.rollout.temperature)), NO_IDENTITY)
    temperature = bits_float(contract.semantics.temperature)
    if temperature != np.float32(config.rollout.temperature):
        raise BadConfig(
            field="rollout.temperature",
            found=config.rollout.temperature,
            allowed=f"the contract's {temperature}",
            reason="Log-probabilities are log_softmax(logits / T) at one T on both sides.",
        )
    mesh, placed = config.train.mesh.degrees, policy.placement.degrees
    if any(placed.get(axis, 1) != mesh.get(axis, 1) for axis in mesh.keys() | placed.keys()):
        raise BadConfig(
            field="train.mesh",
            found=mesh,
            allowed=f"the policy's {placed}",
            reason="The policy was placed on other devices; see isojax.MeshPolicy.",
        )
    contract.check_mesh(mesh)
    handshake(contract, engine.report(), trainer_mesh=mesh)
    return Agreement(temperature, contract.validate_identities().numerical_policy)
