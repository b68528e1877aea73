"""A stop signal in the middle of an update waits until the step is whole."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def finishing_first() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM take effect when the block ends; a second one takes effect at once.

    A signal that nobody handles in Python, such as SIGTERM by default, ends the process as ever.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread alone.
        yield
        return
    found = ((number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM))
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
        n: handler for n, handler in found if callable(handler)
    }
    waiting: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if waiting:
            handlers[number](number, frame)
        waiting.append(number)
        print("isojax: stopping once this step is finished; once more stops at once", file=sys.stderr)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if waiting:
            os.kill(os.getpid(), waiting[0])
