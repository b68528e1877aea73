"""Compiled programs kept on the disk between runs, by JAX's own persistent cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from contracts.errors import BadConfig
from isojax.cpu_arch import cpu_arch

DEFAULT = "default"
OFF = "off"


def use_compilation_cache(setting: str, config_folder: Path) -> Path | None:
    """Turns the cache on for what is compiled from now on; the folder that this process uses, None for none.

    setting: "off", a folder (relative to `config_folder`), or "default": the one in JAX_COMPILATION_CACHE_DIR, JAX's
    own variable, where that is set, else isojax's in the user's cache folder. A program is looked for by a hash of
    itself, its options, the versions of jaxlib and of the platform, and the kind of device, so what is found was
    compiled from the same by the same. A kind says "cpu" of every CPU, so the folder is one an instruction set.

    Raises BadConfig for a folder that cannot be made.
    """
    if setting == OFF:
        _set(None)
        return None
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if setting == DEFAULT and given:
        return Path(given)
    folder = (user_cache() if setting == DEFAULT else config_folder / Path(setting).expanduser()) / cpu_arch()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(
            field="train.compilation_cache",
            found=setting,
            allowed='a folder that can be written, or "off"',
            reason=f"{folder} cannot be made: {error.strerror}.",
        ) from None
    _set(str(folder))
    return folder


def user_cache() -> Path:
    """`isojax/compiled` in the user's cache folder, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isojax" / "compiled"


def _set(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX asks for the folder once; had anything been compiled before, it would go on without one.
    reset_cache()
