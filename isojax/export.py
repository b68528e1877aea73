"""Write a policy as a folder that vLLM, transformers and isojax load: weights, tokenizer, rope table, contract."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from contracts import FILE_NAME, ExecutionContract, save_contract
from contracts.errors import BadConfig
from isojax.contract import build_contract
from isojax.kernels import KERNELS_FOLDER, Bundle
from isojax.policy.hugging_face import to_hugging_face
from isojax.policy.policy import Parameters, Policy
from isojax.weights.load import ROPE_FILE, ROPE_TENSOR
from isojax.weights.names import unpack
from isojax.weights.safetensors import INDEX_FILE, SINGLE_FILE, write_tensors
from isojax.whole_folder import appearing_whole
from pallas_kernels.store import save_bundle

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def export_policy(
    folder: str | Path,
    policy: Policy,
    params: Parameters | None,
    tokenizer_files: Mapping[str, bytes],
    *,
    temperature: float = 1.0,
    arch: str = "cpu",
    kernels: Bundle | None = None,
) -> ExecutionContract:
    """Write the policy folder and return its contract. `isojax.load` of the folder gives the same bits.

    params: None leaves the weights out, for an engine that starts with `initial_weights = False` and gets them by sync.
    tokenizer_files: by name, from `isojax.weights.tokenizer.tokenizer_files`; empty for a policy without a tokenizer.
    temperature: the contract's one T. arch, kernels: "sm90" with the policy's sealed kernels, which go into `kernels/`,
    or "cpu" without; see `build_contract`. The folder appears whole or not at all: it is written beside its place and
    renamed; an older policy folder of that name is replaced.

    Raises `BadConfig` where the place is taken by something else, the parameters are not the policy's or the
    architecture has no kernels, `BadBundle` for too many kernels, and `UncoveredArithmetic` for a policy with
    arithmetic outside of its regions.
    """
    target = Path(folder).resolve()
    check_target(target)
    if params is not None:
        policy.check_parameters(params)
    contract = build_contract(policy, tokenizer=tokenizer_files, arch=arch, temperature=temperature, kernels=kernels)
    with appearing_whole(target) as partial:
        _write(partial, policy, tokenizer_files)
        if params is not None:
            write_weights(partial, policy, params)
        if kernels is not None:
            save_bundle(partial / KERNELS_FOLDER, kernels)
        save_contract(contract, partial / FILE_NAME)
    return contract


def copy_policy(source: str | Path, folder: str | Path) -> None:
    """Copy an exported policy as it is, kernels and proof included; `folder` is replaced as by `export_policy`.

    Files of `source` and its kernels alone: other folders in it may be large, or hold `folder` itself. Links are
    followed. Raises `BadConfig` where the place is taken by something else.
    """
    origin, target = Path(source), Path(folder).resolve()
    check_target(target)
    with appearing_whole(target) as partial:
        for path in (*origin.iterdir(), *(origin / KERNELS_FOLDER).rglob("*")):
            if path.is_file():
                place = partial / path.relative_to(origin)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)


def export_checkpoint(
    folder: str | Path, policy: Policy, params: Parameters, tokenizer_files: Mapping[str, bytes]
) -> None:
    """Write an ordinary Hugging Face folder of a policy: what stock vLLM and transformers load, without a contract.

    `folder` is new or empty. Raises `BadConfig` where it is not, or the parameters are not the policy's.
    """
    target = Path(folder).resolve()
    check_target(target)
    policy.check_parameters(params)
    target.mkdir(parents=True, exist_ok=True)
    config = to_hugging_face(policy.config, policy.dtype)
    config["architectures"] = [config.pop("isojax")["architecture"]]
    _write_json(target / CONFIG_FILE, config)
    write_weights(target, policy, params)
    for name, content in tokenizer_files.items():
        (target / name).write_bytes(content)


def check_target(folder: Path) -> None:
    """Raise `BadConfig` where an export to `folder`, an absolute path, would delete something else than a policy."""
    if Path.cwd().is_relative_to(folder):
        raise BadConfig(
            field="folder",
            found=str(folder),
            allowed="a folder beside or below the current one",
            reason="It is replaced as a whole, which would leave this process and its shell in a deleted folder.",
        )
    if folder.exists() and not (folder / FILE_NAME).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig(
            field="folder",
            found=str(folder),
            allowed="a new folder, an empty one or an exported policy",
            reason="It holds something else, which export would delete.",
        )


def write_weights(folder: Path, policy: Policy, params: Parameters) -> None:
    """Write the parameters under their Hugging Face names: one safetensors file and its index."""
    host = {name: np.asarray(jax.device_get(value)) for name, value in params.items()}
    tensors = dict(unpack(policy.config, host))
    write_tensors(folder / SINGLE_FILE, tensors)
    # Without an index vLLM would read every .safetensors file here as weights, the rope table as well.
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / INDEX_FILE,
        {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), SINGLE_FILE)},
    )


def _write(folder: Path, policy: Policy, tokenizer_files: Mapping[str, bytes]) -> None:
    config = policy.config
    _write_json(folder / CONFIG_FILE, to_hugging_face(config, policy.dtype))
    # vLLM takes default sampling settings from this file: it must hold none, only where generation stops.
    stop = to_hugging_face(config, policy.dtype)
    _write_json(
        folder / GENERATION_FILE, {name: stop[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    write_tensors(folder / ROPE_FILE, {ROPE_TENSOR: np.asarray(policy.buffers["rope_table"])})
    for name, content in tokenizer_files.items():
        (folder / name).write_bytes(content)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
