"""Folders that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """A new folder to write into, which gets the name `target` once the block has ended well."""
    # Not by the process's number: in containers it comes again, and what a killed one left would be in the way.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(target: Path, partial: Path) -> None:
    """Put the finished folder in place; an older one goes only after the new one has its name."""
    old = partial.with_suffix(".old")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)
