"""Finds a user's own function from its `module:function` name, and says where it failed when it does."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contracts.errors import BadConfig, IsojaxError

_PACKAGE = str(Path(__file__).parents[1])
_IMPORT_MACHINERY = (str(Path(importlib.__file__).parent), "<frozen importlib")


def import_function(name: str, *, field: str, folder: Path) -> Callable[..., Any]:
    """The function `module:function`, the module looked for in `folder` first and then among the installed ones.

    Raises BadConfig, naming `field`, if the name is malformed, the module or function does not exist, or the module
    raises while it is imported; then also the file and the line.
    """
    module_name, separator, function_name = name.partition(":")
    if not (separator and all(module_name.split(".")) and function_name):
        raise BadConfig(field=field, found=name, allowed="module:function", reason="It names no function.")
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    try:
        with own_code(name, field=field):
            module = importlib.import_module(module_name)
    except BadConfig as error:
        if not isinstance(missing := error.__cause__, ModuleNotFoundError):
            raise
        raise BadConfig(
            field=field,
            found=name,
            allowed=f"a module in {path} or an installed one",
            reason=f"There is no module {missing.name!r}.",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        place = getattr(module, "__file__", None) or module_name
        raise BadConfig(field=field, found=name, allowed=known, reason=f"{place} has no function {function_name!r}.")
    return function


@contextmanager
def own_code(name: str, *, field: str, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """Runs a user's code: whatever it raises becomes a BadConfig with the exception, the file and the line.

    name: of the code. field: the setting that names it. function: what is called, whose own place is given where the
    call itself fails. A refusal of isojax passes through.
    """
    try:
        yield
    except IsojaxError:
        raise
    # Broad, since it is somebody else's code and may raise anything.
    except Exception as error:
        raise BadConfig(
            field=field,
            found=f"{type(error).__name__}: {error}",
            allowed="code that returns",
            reason=f"{name} raised it{_place(error, function)}.",
        ) from error


def _place(error: Exception, function: Callable[..., Any] | None) -> str:
    """The user's own line: the first frame that is neither isojax's nor the import machinery's."""
    if isinstance(error, SyntaxError):
        return f" in {error.filename}, line {error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((_PACKAGE, *_IMPORT_MACHINERY)):
            return f" in {frame.filename}, line {frame.lineno}"
    code = getattr(function, "__code__", None)
    return "" if code is None else f"; it is defined in {code.co_filename}, line {code.co_firstlineno}"
