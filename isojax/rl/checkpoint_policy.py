"""The policy of a training checkpoint, as `isojax export` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax

from contracts import bits_float, load_contract
from contracts.errors import BadCheckpoint
from contracts.user_files import read_json_object
from isojax.policy.policy import Policy
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.config_file import parse_config
from isojax.rl.optimizer import Parameters, build_optimizer, compute_copies, start_state
from isojax.rl.run_folder import RunFolder
from isojax.weights.digest import digest
from isojax.weights.load import load_policy
from isojax.weights.tokenizer import TokenizerFiles, tokenizer_files


class CheckpointPolicy(NamedTuple):
    """What a checkpoint holds of a policy: after which step, its weights and their digest, tokenizer, temperature."""

    step: int
    weight_digest: str
    policy: Policy
    params: Parameters
    tokenizer_files: TokenizerFiles
    temperature: float


def is_checkpoint(path: Path) -> bool:
    """Whether `path` looks like `RUN/checkpoints/STEP` or `RUN`, and not like a folder of weights."""
    return RunFolder(path).checkpoints.is_dir() or RunFolder(path.parent.parent).checkpoints == path.parent


def load_checkpoint(checkpoint: Path) -> CheckpointPolicy:
    """The policy of a checkpoint, to be exported.

    checkpoint: `RUN/checkpoints/STEP`, or `RUN` for the newest. Raises BadCheckpoint if it is not one, is damaged, or
    does not give the weights that the run recorded.
    """
    folder, step = _locate(checkpoint)
    config = parse_config(read_json_object(folder.config, refusal=BadCheckpoint), source=str(folder.config))
    policy = load_policy(folder.policy, config.policy.dtype)
    optimizer = build_optimizer(config.optimizer)
    like = jax.eval_shape(lambda: start_state(optimizer, jax.tree.map(_zeros, policy.parameter_shapes)))
    # Said of every array, since the devices that wrote it need not be here.
    like = jax.tree.map(_placed, like, policy.placement.shardings(like))
    checkpoints = Checkpoints(folder.checkpoints)
    try:
        state, progress = checkpoints.restore(step, like)
    finally:
        checkpoints.close()
    params = jax.jit(compute_copies, static_argnums=1)(state.master, policy)
    if digest(params) != progress.weight_digest:
        raise BadCheckpoint(
            field=f"weights of {checkpoint}",
            found=digest(params),
            allowed=progress.weight_digest,
            reason="They are not the weights that the run had after that step.",
        )
    if config.policy.arm == "native":
        # The weights are a policy's as any other's; only the run that made them claimed no contract.
        temperature = config.rollout.temperature
    else:
        temperature = bits_float(load_contract(folder.policy).semantics.temperature)
    return CheckpointPolicy(step, progress.weight_digest, policy, params, tokenizer_files(folder.policy), temperature)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.numpy.zeros(shape.shape, shape.dtype)


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _is_run(folder: RunFolder) -> bool:
    return folder.config.exists() and folder.checkpoints.is_dir()


def _locate(checkpoint: Path) -> tuple[RunFolder, int]:
    # Before `Checkpoints` opens a folder, since it makes one that is not there.
    if _is_run(folder := RunFolder(checkpoint)):
        checkpoints = Checkpoints(folder.checkpoints)
        step = checkpoints.latest()
        checkpoints.close()
        if step is not None:
            return folder, step
    elif checkpoint.name.isdecimal() and _is_run(folder := RunFolder(checkpoint.parent.parent)):
        return folder, int(checkpoint.name)
    raise BadCheckpoint(
        field="checkpoint",
        found=str(checkpoint),
        allowed="runs/NAME/checkpoints/STEP, or runs/NAME with a checkpoint in it",
        reason="There is no training checkpoint.",
    )
