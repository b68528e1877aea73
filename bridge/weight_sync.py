"""Weight sync through vLLM's own weight transfer: packed parameters, chunk by chunk, in place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jax
import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from contracts.errors import BadCheckpoint, UnsupportedModel, UnsupportedRequest, WeightDigestMismatch

if TYPE_CHECKING:
    from vllm import LLM

    from bridge.model import IsojaxPolicyForCausalLM
    from bridge.weights import EngineWeights

BACKEND = "isojax"
"""The name under which vLLM's weight transfer finds this backend."""

CHUNK_BYTES = 64 << 20
"""Size of the staging file: what a sync needs beside the weights themselves."""


@dataclass
class Piece:
    """A run of elements of a packed parameter: `count` from flat index `start`, at byte `offset` of the file."""

    name: str
    start: int
    count: int
    offset: int
    dtype: str


@dataclass
class StagingInit(WeightTransferInitInfo):
    """Where the sender writes: a file that both processes map. vLLM passes it from `init_weight_transfer_engine`."""

    path: str


@dataclass
class StagedPieces(WeightTransferUpdateInfo):
    """What the file holds now: `Piece` fields as plain values, since vLLM serialises them between processes."""

    pieces: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    """Whole parameters by name, as anything that exports DLPack memory: in one process nothing is staged."""


class StagedWeightTransfer(WeightTransferEngine[StagingInit, StagedPieces]):
    """The engine's end. Parameters are overwritten in place, so addresses, views and captured graphs stay valid."""

    init_info_cls = StagingInit
    update_info_cls = StagedPieces

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Signature set by vLLM."""
        super().__init__(*arguments, **keywords)
        self._staged: np.memmap[Any, np.dtype[np.uint8]] | None = None

    @property
    def _weights(self) -> EngineWeights:
        return cast("IsojaxPolicyForCausalLM", self.model).weights

    def init_transfer_engine(self, init_info: StagingInit) -> None:
        """Maps the sender's file."""
        self._staged = np.memmap(init_info.path, np.uint8, mode="r")

    def start_weight_update(self) -> None:
        """Forgets which weights are held: until the update is complete they are a mixture."""
        self._weights.begin_update()

    def receive_weights(self, update_info: StagedPieces) -> None:
        """Copies the staged pieces, or whole parameters from the trainer's own memory, into the engine's."""
        for name, array in update_info.arrays.items():
            self._weights.write(name, 0, torch.from_dlpack(array).reshape(-1))
        if not update_info.pieces:
            return
        if self._staged is None:
            raise RuntimeError("update_weights before init_weight_transfer_engine")
        for fields in update_info.pieces:
            piece = Piece(**fields)
            words = self._staged[piece.offset : piece.offset + piece.count * _WORDS[piece.dtype].itemsize]
            # A copy: torch tensors over read-only memory are undefined behaviour.
            values = torch.from_numpy(words.view(_WORDS[piece.dtype]).copy()).view(getattr(torch, piece.dtype))
            self._weights.write(piece.name, piece.start, values)

    def finish_weight_update(self) -> None:
        """Takes the digest of what is held now; after an incomplete update there is none, and the engine stays shut.

        It does not raise, since vLLM would then never end the session.
        """
        self._weights.finish_update()

    def shutdown(self) -> None:
        """Unmaps the file."""
        self._staged = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> NoReturn:
        """vLLM 0.26's way to send from a trainer, which cannot check a digest: refused, see `WeightSender`."""
        raise UnsupportedModel(
            field="trainer_send_weights",
            found=BACKEND,
            allowed="VllmEngine.sync",
            reason="The trainer's end of this backend writes packed pieces into the staging file and compares digests.",
        )


# numpy has no bfloat16 of its own: both floats travel as integers of the same width.
_WORDS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.int16), "float32": np.dtype(np.int32)}


class WeightSender:
    """The trainer's end: copies packed parameters through the staging file, whatever process the engine lives in.

    An engine in this process reads JAX arrays where they are: on a card that is one copy on the device.
    """

    def __init__(self, llm: LLM, *, same_process: bool = False) -> None:
        """Creates the staging file (in memory where the system has /dev/shm) and tells the engine about it."""
        self._llm = llm
        self._same_process = same_process
        shared_memory = Path("/dev/shm")
        folder = shared_memory if shared_memory.is_dir() and os.access(shared_memory, os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="isojax-weights-", dir=folder)
        os.close(handle)
        self._path = Path(name)
        self._buffer = np.memmap(self._path, np.uint8, mode="w+", shape=(CHUNK_BYTES,))
        llm.init_weight_transfer_engine({"init_info": {"path": str(self._path)}})

    def send(self, params: Mapping[str, Any]) -> None:
        """Writes all parameters, between vLLM's start and finish. Raises BadCheckpoint for a dtype no policy has."""
        if self._same_process and all(_on_one_device(value) for value in params.values()):
            for name in sorted(params):
                self._llm.update_weights({"update_info": {"arrays": {name: params[name]}}})
            return
        for pieces in self._chunks(params):
            self._llm.update_weights({"update_info": {"pieces": pieces}})

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _chunks(self, params: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
        pieces: list[dict[str, Any]] = []
        used = 0
        for name in sorted(params):
            array = np.asarray(params[name])
            dtype = array.dtype.name
            if dtype not in _WORDS:
                raise BadCheckpoint(
                    field=name, found=dtype, allowed=sorted(_WORDS), reason="Policies hold these dtypes alone."
                )
            words = np.ascontiguousarray(array).reshape(-1).view(_WORDS[dtype])
            start = 0
            while start < words.size:
                count = min(words.size - start, (CHUNK_BYTES - used) // words.itemsize)
                if count == 0:
                    yield pieces
                    pieces, used = [], 0
                    continue
                size = count * words.itemsize
                self._buffer[used : used + size].view(words.dtype)[:] = words[start : start + count]
                pieces.append({"name": name, "start": start, "count": count, "offset": used, "dtype": dtype})
                start += count
                used += -(-size // 64) * 64
        if pieces:
            yield pieces


def require_idle(llm: LLM) -> None:
    """Raise UnsupportedRequest while requests are in flight: weights must not change, nor memory go, beneath them."""
    running = llm.llm_engine.get_num_unfinished_requests()
    if running:
        raise UnsupportedRequest(
            field="engine",
            found=f"{running} requests in flight",
            allowed="none",
            reason="A sync would mix two policies in their tokens, a sleep take their cache. Let them finish first.",
        )


def empty_prefix_cache(llm: LLM) -> None:
    """Drop cached keys and values of older weights. Raises WeightDigestMismatch if vLLM will not."""
    if not llm.reset_prefix_cache():
        raise WeightDigestMismatch(
            field="prefix cache",
            found="vLLM refused to empty it",
            allowed="an empty cache after every change of weights",
            reason="It would serve keys and values of the old weights.",
        )


def _on_one_device(value: Any) -> bool:
    """Whether torch can read this array's memory: JAX's own, of one device."""
    return isinstance(value, jax.Array) and len(value.devices()) == 1
