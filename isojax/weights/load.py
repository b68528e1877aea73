"""Load a policy and its parameters from a folder or a GGUF file."""

from pathlib import Path

import jax
import numpy as np

from contracts import FILE_NAME, ExecutionContract, load_contract
from contracts.errors import BadBundle, BadCheckpoint, BadConfig, IdentityMismatch, UnsupportedModel
from contracts.user_files import read_json_object
from isojax.kernels import KERNELS_FOLDER, load_kernels, packing_of
from isojax.policy.config import PolicyConfig, config_digest
from isojax.policy.dense import Remat
from isojax.policy.hugging_face import from_hugging_face
from isojax.policy.policy import DTYPES, Policy
from isojax.policy.rope import rope_table, rope_table_digest
from isojax.weights.gguf import open_gguf
from isojax.weights.packing import pack_tensors
from isojax.weights.safetensors import open_tensors, read_file
from pallas_kernels import kernel_source

ROPE_FILE = "rope_table.safetensors"
ROPE_TENSOR = "rope_table"


def load(
    source: str | Path, dtype: str | None = None, *, remat: Remat = "layer", emits_kernels: bool = True
) -> tuple[Policy, dict[str, jax.Array]]:
    """A policy and its packed parameters from a Hugging Face folder, an exported policy folder or a .gguf file.

    dtype: "bfloat16" or "float32" of parameters and activations; None takes the dtype that config.json names, and
    bfloat16 for GGUF. Narrowing rounds once, to nearest even; widening is exact. remat: see `Policy`. emits_kernels:
    whether an exported policy's sealed kernels become those that this process emits on a card; of one call there can be
    one set.

    Raises `BadCheckpoint` for missing, damaged, extra or misshapen weights, `BadConfig` for a malformed config.json,
    `BadBundle` for sealed kernels that are not the contract's and `UnsupportedModel` for what isojax does not implement
    exactly.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        model = open_gguf(path)
        policy = Policy(model.config, dtype=dtype or "bfloat16", remat=remat)
        return policy, pack_tensors(policy, model.names, model.read, str(path))
    policy = load_policy(path, dtype, remat=remat, emits_kernels=emits_kernels)
    with open_tensors(path) as (names, read):
        return policy, pack_tensors(policy, names, read, str(path))


def load_policy(
    folder: str | Path, dtype: str | None = None, *, remat: Remat = "layer", emits_kernels: bool = True
) -> Policy:
    """The policy of a folder without its weights: config.json and, where they were shipped, rope table and kernels.

    Sealed kernels are checked against the contract, and become those that this process emits on a card, if it
    ``emits_kernels``. Arguments and errors as for `load`; also `BadBundle` for kernels that are not the contract's.
    """
    path = Path(folder)
    raw = read_config(path)
    config = from_hugging_face(raw)
    policy = Policy(config, dtype=dtype or _dtype_of(raw), remat=remat, rope=_shipped_rope(path, config))
    contract = load_contract(path) if (path / FILE_NAME).exists() else None
    if contract is not None:
        _check_contract(path, policy, contract)
    if contract is not None and not contract.arch.startswith("cpu-"):
        kernels = load_kernels(path, contract)
        if emits_kernels:
            kernel_source.LOADED.add(kernels.programs)
        policy.row_buckets = kernels.shapes.head_rows
        policy.packing = packing_of(kernels.shapes)
    elif (path / KERNELS_FOLDER).exists():
        raise BadBundle(
            field=str(path / KERNELS_FOLDER),
            found="sealed kernels",
            allowed="none beside " + ("a CPU contract" if contract else "no contract"),
            reason="Nothing says that they are this policy's.",
        )
    return policy


def read_config(folder: Path) -> dict[str, object]:
    """The parsed config.json of a folder.

    Raises `BadCheckpoint` for no such folder and `BadConfig` where the file is missing or not a JSON object.
    """
    if not folder.is_dir():
        raise BadCheckpoint(
            field="policy", found=str(folder), allowed="an existing folder", reason="There is nothing to load."
        )
    return read_json_object(folder / "config.json", refusal=BadConfig)


def _check_contract(folder: Path, policy: Policy, contract: ExecutionContract) -> None:
    """Refuse a contract that is about another policy than the files beside it. Raises `IdentityMismatch`."""
    rope = rope_table_digest(np.asarray(policy.buffers["rope_table"]))
    for field, found, stored in (
        ("model.config_digest", config_digest(policy.config), contract.model.config_digest),
        ("semantics.rope_table_digest", rope, contract.semantics.rope_table_digest),
        ("semantics.split_k_leaves", policy.config.leaves, contract.semantics.split_k_leaves),
    ):
        if found != stored:
            raise IdentityMismatch(
                field=field,
                found=f"{found} from the files in {folder}",
                allowed=f"{stored} from {FILE_NAME}",
                reason="config.json or the rope table was changed after the export.",
            )


def _dtype_of(raw: dict[str, object]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype not in DTYPES:
        raise UnsupportedModel(
            field="torch_dtype",
            found=dtype,
            allowed=list(DTYPES),
            reason="The regions are defined for these; pass dtype to convert the weights.",
        )
    return str(dtype)


def _shipped_rope(folder: Path, config: PolicyConfig) -> np.ndarray | None:
    """The rope table beside an exported policy, after checking that it is this config's.

    sin and cos of NumPy differ in the last fp64 bit between processors, so another machine's table may differ from a
    fresh one by one fp32 unit in the last place. Any more, and the file belongs to another config.
    """
    path = folder / ROPE_FILE
    if not path.exists():
        return None
    tensors = read_file(path)
    table = tensors.get(ROPE_TENSOR)
    expected = rope_table(config)
    if table is None or table.shape != expected.shape or table.dtype != expected.dtype:
        found = None if table is None else f"{table.dtype}{list(table.shape)}"
        raise BadCheckpoint(
            field=str(path),
            found=found,
            allowed=f"{ROPE_TENSOR}: float32{list(expected.shape)}",
            reason="config.json and the rope table disagree.",
        )
    # Not <=, so that NaN is refused as well.
    if not np.all(np.abs(table - expected) <= np.spacing(np.abs(expected))):
        raise BadCheckpoint(
            field=str(path),
            found=f"a table that differs by up to {np.max(np.abs(table - expected)):.3g}",
            allowed="the table of config.json's rope settings",
            reason="config.json and the rope table disagree.",
        )
    return table
