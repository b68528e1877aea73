"""Compiled programs kept on the disk between runs, by JAX's own persistent cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryFile

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from contracts.errors import BadConfig
from isojax.cpu_arch import cpu_arch

DEFAULT = "default"
OFF = "off"

# OSError: the disk refuses. ValueError: a null character. RuntimeError: `~` of a user without a home.
_UNUSABLE = (OSError, ValueError, RuntimeError)


def use_compilation_cache(setting: str, config_folder: Path) -> Path | None:
    """Turns the cache on for what is compiled from now on; the folder that this process uses, None for none.

    setting: "off", a folder (relative to `config_folder`), or "default": the one in JAX_COMPILATION_CACHE_DIR, JAX's
    own variable, where that is set, else isojax's in the user's cache folder. A program is looked for by a hash of
    itself, its options, the versions of jaxlib and of the platform, and the kind of device, so what is found was
    compiled from the same by the same. A kind says "cpu" of every CPU, so the folder is one an instruction set.

    Raises BadConfig for a folder of the configuration that takes no files. Where it is the user's own that takes none,
    stderr says so and nothing is kept: nobody asked for it.
    """
    if setting == OFF:
        folder = None
    elif setting != DEFAULT:
        folder = _of_configuration(setting, config_folder)
    elif given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(given)
    else:
        folder = _of_user()
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    # JAX asks for the folder once; had anything been compiled before, it would go on without one.
    reset_cache()
    return folder


def user_cache() -> Path:
    """`isojax/compiled` in the user's cache folder, as the XDG base directory specification has it: a
    relative XDG_CACHE_HOME does not count.

    Raises RuntimeError for a user without a home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "isojax" / "compiled"


def _of_configuration(setting: str, config_folder: Path) -> Path:
    reason = "It is neither of the two words nor a folder of this machine; write ./NAME for a folder of such a name."
    if setting.strip().lower() not in ("", DEFAULT, OFF) and "://" not in setting:
        try:
            return _taking_files(config_folder / Path(setting).expanduser())
        except _UNUSABLE as error:
            reason = _said(error)
    raise BadConfig(
        field="train.compilation_cache",
        found=repr(setting),
        allowed='a folder that can be written, "default" or "off"',
        reason=reason,
    )


def _of_user() -> Path | None:
    try:
        return _taking_files(user_cache())
    except _UNUSABLE as error:
        print(
            f"isojax: compiled programs are not kept for the next run: {_said(error)} "
            "train.compilation_cache names another folder.",
            file=sys.stderr,
        )
        return None


def _taking_files(place: Path) -> Path:
    """This instruction set's part of `place`, made where it is missing, for this user alone: what JAX finds there, it
    runs. Raises `_UNUSABLE` unless files can be written there."""
    folder = place.absolute() / cpu_arch()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return folder


def _said(error: Exception) -> str:
    if not isinstance(error, OSError):
        return f"{str(error).rstrip('.').capitalize()}."
    return f"{error.filename}: {error.strerror}."
