"""Builds a run from its configuration: policy, task, exported folder, engine, trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax

from contracts import load_contract, token_ids
from contracts.errors import BadConfig
from isojax.contract import require_claimable
from isojax.export import copy_policy, export_checkpoint, export_policy
from isojax.mesh_policy import MeshPolicy, open_mesh
from isojax.policy.config import PolicyConfig
from isojax.policy.dense import Remat
from isojax.policy.native import native_policy
from isojax.policy.policy import Policy
from isojax.rl.card import is_proved_for_run, machine_arch, prove_for_run, run_shapes, seal_for_run
from isojax.rl.config import Config, PolicySection
from isojax.rl.engine_defaults import DEFAULT_KV_CACHE_BYTES
from isojax.rl.files import written
from isojax.rl.memory_split import memory_split
from isojax.rl.optimizer import Parameters
from isojax.rl.packing import fitting_lengths, require_fitting
from isojax.rl.prompts import PromptEncoder, encode_prompts
from isojax.rl.rollout import engine_class, open_engine
from isojax.rl.run_folder import RunFolder
from isojax.rl.tasks import Task, open_task
from isojax.rl.tensorboard import require_tensorboard
from isojax.rl.trainer import Trainer
from isojax.weights.load import load
from isojax.weights.tokenizer import TokenizerFiles, tokenizer_files

PACKAGE = "package:"
ROW_STEP = 64
"""The native arm's rows are multiples of it: a sequence shorter than the longest ends in padding anyway."""
GENERATED_PROMPTS = {"exact": 16, "native": 2000}
"""Prompts of a generated data set that are looked at before the start. The native arm's rows must hold all of them."""


def assemble(config: Config, *, config_folder: Path, folder: RunFolder, resume: bool = False) -> Trainer:
    """A trainer that is ready to run in `folder`, its engine started and synced.

    config_folder: what relative paths and modules of the configuration are relative to. resume: `folder` holds an
    earlier part of the same run, which is continued. Whatever is wrong with the input is refused before the engine
    starts.
    """
    task = open_task(config.task, config_folder)
    if config.metrics.tensorboard:
        require_tensorboard()
    mesh = open_mesh(config.train.mesh.degrees)
    if resume:
        folder.require_same_config(config)
    else:
        _write_policy(config, config_folder, folder.policy)
    # From the exported folder in both cases, so that a resumed run starts from the very same bytes.
    policy, params = load(folder.policy, config.policy.dtype, remat=config.train.remat)
    encoder = PromptEncoder(folder.policy)
    longest = _require_fitting_prompts(config, policy, task, encoder)
    if resume:
        _require_memory(config, policy)
    stop = config.rollout.stop_token_ids
    if stop is not None:
        token_ids(stop, field="rollout.stop_token_ids", vocab_size=policy.config.vocab_size)
    contract = load_contract(folder.policy) if config.policy.arm == "exact" else None
    if contract is None:
        policy = native_policy(policy, -(-longest // ROW_STEP) * ROW_STEP)
    elif mesh.size > 1:
        for device in mesh.devices.flat:
            contract.check_device_kind(device.device_kind)
        policy = MeshPolicy(policy, mesh, contract)
    # The trainer keeps still while the engine captures graphs: work of another thread would break a capture.
    jax.block_until_ready(params)
    engine = open_engine(config.engine.name, folder.policy, arm=config.policy.arm, **config.engine.settings)
    try:
        trainer = Trainer(
            config,
            policy=policy,
            params=params,
            contract=contract,
            engine=engine,
            task=task,
            encoder=encoder,
            stop_token_ids=policy.config.eos_token_ids if stop is None else stop,
            folder=folder,
        )
        if resume:
            trainer.resume()
        # Last: a resumed run that is refused keeps the configuration that it ran with.
        folder.write_config(config)
    except BaseException:
        engine.close()
        raise
    return trainer


def _write_policy(config: Config, config_folder: Path, folder: Path) -> None:
    """The folder that the run starts from. On a card its kernels are sealed and proved, unless its source is an
    exported policy that brings such: then that is copied."""
    policy, params, files = open_policy(config.policy, config_folder, config.train.remat)
    # Before kernels are sealed and proved, which takes minutes.
    _require_memory(config, policy)
    arch = machine_arch()
    if config.policy.arm == "native":
        with written(folder):
            export_checkpoint(folder, policy, params, files)
        return
    require_claimable(policy, config.train.mesh.degrees)
    kernels = None
    if arch != "cpu":
        shapes = run_shapes(config, policy.config.max_position)
        source = _source(config.policy, config_folder)
        if source is not None and is_proved_for_run(source, config, shapes):
            with written(folder):
                copy_policy(source, folder)
            return
        kernels = seal_for_run(policy, shapes)
    with written(folder):
        temperature = config.rollout.temperature
        export_policy(folder, policy, params, files, temperature=temperature, arch=arch, kernels=kernels)
    if kernels is not None:
        prove_for_run(folder, arch, config.train.mesh.degrees)


def open_policy(
    section: PolicySection, config_folder: Path, remat: Remat = "none"
) -> tuple[Policy, Parameters, TokenizerFiles]:
    """The policy that a configuration names, its starting weights and its tokenizer's files (none for a random one).

    Raises BadConfig for a package without weights, and what `isojax.weights.load` raises.
    """
    if section.random is not None:
        policy = Policy(PolicyConfig.from_hugging_face(section.random), dtype=section.dtype, remat=remat)
        return policy, policy.init(jax.random.key(section.random_seed)), {}
    source = _source(section, config_folder)
    assert source is not None
    # A run emits the kernels of its own folder, which may be others than its source's.
    policy, params = load(source, section.dtype, remat=remat, emits_kernels=False)
    return policy, params, tokenizer_files(source)


def _source(section: PolicySection, config_folder: Path) -> Path | None:
    """Where the starting weights lie; None for random ones. Raises as `package_weights`."""
    if section.source is None:
        return None
    return package_weights(section.source) if section.source.startswith(PACKAGE) else config_folder / section.source


def package_weights(source: str) -> Path:
    """The one GGUF file in an installed Python package, from `package:NAME`. Raises BadConfig for none or several."""
    name = source.removeprefix(PACKAGE)
    try:
        specification = importlib.util.find_spec(name)
    # ImportError: a parent package is missing, or the name is relative. ValueError: there is no name.
    except (ImportError, ValueError):
        specification = None
    if specification is None or specification.origin is None or not specification.has_location:
        raise BadConfig(
            field="policy.source",
            found=source,
            allowed="an installed package, a folder or a .gguf file",
            reason=f"No package {name!r} is installed here; pip install it first.",
        )
    found = sorted(Path(specification.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise BadConfig(
            field="policy.source",
            found=[path.name for path in found],
            allowed="one .gguf file",
            reason=f"{Path(specification.origin).parent} does not say which weights are meant.",
        )
    return found[0]


def _require_fitting_prompts(config: Config, policy: Policy, task: Task, encoder: PromptEncoder) -> int:
    """Refuse prompts that cannot be run, before an engine is started for them.

    Returns the tokens of the longest one that was looked at, with its completion.
    """
    # A generated data set may be endless; a few of its prompts show whether its form is right.
    most = len(task.examples) if isinstance(task.examples, list) else GENERATED_PROMPTS[config.policy.arm]
    count = min(len(task.examples), most)
    prompts = encode_prompts(
        encoder,
        [task.examples[index] for index in range(count)],
        system=config.task.system,
        max_tokens=config.rollout.max_tokens,
        max_position=policy.config.max_position,
        vocab_size=policy.config.vocab_size,
    )
    longest = max(map(len, prompts)) + config.rollout.max_tokens
    most, _ = fitting_lengths(config.train.micro_batch_tokens, policy.packing)
    require_fitting(longest, most, policy.packing, "The longest prompt with its completion")
    return longest


def _require_memory(config: Config, policy: Policy) -> None:
    """Refuse a card that cannot hold trainer and engine, before the engine is started: on a mesh the first, which has
    its piece of the trainer and all of the engine."""
    card = getattr(engine_class(config.engine.name), "device_bytes", lambda: None)()
    kv_cache_bytes = config.engine.settings.get("kv_cache_bytes", DEFAULT_KV_CACHE_BYTES)
    # What is no number, the engine refuses itself.
    if card is None or not isinstance(kv_cache_bytes, int):
        return
    split = memory_split(
        policy.parameter_shapes,
        kv_cache_bytes=kv_cache_bytes,
        reserve_bytes=config.engine.memory.reserve_bytes,
        with_reference=bool(config.algorithm.objective.kl_weight),
        devices=config.train.mesh.devices,
        pieces=config.train.mesh.fsdp,
    )
    split.require_fit(card, (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"))
