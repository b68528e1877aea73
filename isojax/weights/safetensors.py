"""Read safetensors checkpoints, a single file or shards with an index; write one file atomically."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors asks for by name)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from contracts.errors import BadCheckpoint
from contracts.user_files import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_READABLE = ("BF16", "F16", "F32")


@contextmanager
def open_tensors(folder: Path) -> Iterator[tuple[list[str], Callable[[str], np.ndarray]]]:
    """Tensor names of a checkpoint folder and a function that reads one; nothing else is read into memory.

    Raises `BadCheckpoint` for a folder without weights, a damaged or truncated file, an index that disagrees with its
    shards, and a dtype other than BF16, F16 and F32.
    """
    place = _locate(folder)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted(set(place.values()))}
        held = {path: set(file.keys()) for path, file in files.items()}
        for name, path in place.items():
            if name not in held[path]:
                raise BadCheckpoint(
                    field=name,
                    found=f"not in {path}",
                    allowed=f"the shard that {INDEX_FILE} names",
                    reason="The index and the shards disagree.",
                )
        if unlisted := sorted(set().union(*held.values()) - set(place)):
            raise BadCheckpoint(
                field=unlisted[0],
                found=f"{len(unlisted)} tensors outside of {INDEX_FILE}",
                allowed="only tensors that the index lists",
                reason="The index and the shards disagree.",
            )

        def read(name: str) -> np.ndarray:
            file = files[place[name]]
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _READABLE:
                raise BadCheckpoint(
                    field=name,
                    found=f"dtype {dtype} in {place[name]}",
                    allowed=list(_READABLE),
                    reason="Quantised or integer weights have no exact counterpart in the trainer.",
                )
            return file.get_tensor(name)

        yield list(place), read


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file through a temporary name, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # The metadata is what transformers looks for before it accepts a file.
        save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, temporary, metadata={"format": "pt"})
        # The library makes files that their owner alone can read; an engine may run as somebody else.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """All tensors of one small safetensors file. Raises `BadCheckpoint` where it is missing or damaged."""
    with ExitStack() as stack:
        file = _open(path, stack)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (the handle is not a mapping)


def _locate(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = folder / INDEX_FILE
    single = folder / SINGLE_FILE
    if not index.exists():
        if single.exists():
            with ExitStack() as stack:
                return dict.fromkeys(_open(single, stack).keys(), single)
        raise BadCheckpoint(
            field="weights",
            found=f"neither {SINGLE_FILE} nor {INDEX_FILE} in {folder}",
            allowed="a safetensors checkpoint",
            reason="There is nothing to load. Pickled .bin files are not read.",
        )
    weight_map = read_json_object(index, refusal=BadCheckpoint).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise BadCheckpoint(
            field=f"{index}, weight_map",
            found=repr(weight_map)[:80],
            allowed="an object from tensor to file",
            reason="The index is damaged.",
        )
    return {name: folder / shard for name, shard in weight_map.items()}


def _open(path: Path, stack: ExitStack):
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except FileNotFoundError as error:
        raise BadCheckpoint(
            field=str(path), found="no such file", allowed="every file of the checkpoint", reason="A shard is missing."
        ) from error
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(
            field=str(path), found=str(error), allowed="a whole safetensors file", reason="It is damaged or truncated."
        ) from error
