"""Engines of benchmarks and card tests: on a policy that this device is claimed for, after the handshake."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from contracts import FILE_NAME, handshake, load_contract, save_contract


@contextmanager
def running_engine(folder: Path, settings: Mapping[str, Any]) -> Iterator[Any]:
    """A `VllmEngine` that has shaken hands. settings: of `EngineOptions`. Raises what the engine refuses."""
    from bridge.engine import VllmEngine

    engine = VllmEngine(folder, **settings)
    try:
        handshake(load_contract(folder), engine.report())
        yield engine
    finally:
        engine.close()


@contextmanager
def proved_copy(folder: Path) -> Iterator[Path]:
    """The policy with this device claimed as proved, which is what the comparison is there to find out.

    Only claims change, which are no part of the numerical policy; everything else is the folder's own files.
    """
    contract = load_contract(folder)
    claims = contract.claims.model_copy(update={"state": "proved", "device_kinds": (device_kind(),)})
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / folder.resolve().name
        copy.mkdir()
        for path in folder.iterdir():
            if path.name != FILE_NAME:
                (copy / path.name).symlink_to(path.resolve())
        save_contract(contract.replaced(claims=claims), copy)
        yield copy


def device_kind() -> str:
    """The device's name, as torch, JAX and contracts give it."""
    return jax.devices()[0].device_kind
