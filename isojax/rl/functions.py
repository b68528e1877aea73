"""Finds a user's own function from its `module:function` name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.errors import BadConfig


def import_function(name: str, *, field: str, folder: Path) -> Callable[..., Any]:
    """The function `module:function`, the module looked for in `folder` first and then among the installed ones.

    Raises BadConfig, naming `field`, if the name is malformed or the module or function does not exist. An error that
    the module raises while it is imported is the user's own to see and passes through.
    """
    module_name, separator, function_name = name.partition(":")
    if not (separator and module_name and function_name):
        raise BadConfig(field=field, found=name, allowed="module:function", reason="It names no function.")
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadConfig(
            field=field,
            found=name,
            allowed=f"a module in {path} or an installed one",
            reason=f"There is no module {error.name!r}.",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise BadConfig(
            field=field, found=name, allowed=known, reason=f"{module.__file__} has no function {function_name!r}."
        )
    return function
