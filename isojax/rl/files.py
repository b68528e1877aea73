"""Writing files so that a reader, or a crash, never meets half of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts.errors import CannotWrite


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with `text`: the old file stays until the new one is wholly on the disk. Raises CannotWrite."""
    temporary = path.with_name(path.name + ".partial")
    with written(path):
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around the writing of `path`: a disk that refuses it becomes a CannotWrite."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error.strerror or str(error)) from error


def cannot_write(path: Path, problem: str) -> CannotWrite:
    """The refusal of a disk, with what is free where `path` was to go."""
    folder = next((place for place in path.parents if place.is_dir()), Path("/"))
    return CannotWrite(
        field=str(path),
        found=f"{problem} ({shutil.disk_usage(folder).free / 2**20:,.0f} MiB free)",
        allowed="a disk that takes it",
        reason="The run stops here. What was complete before is untouched: make room and continue with --resume.",
    )
