"""One compilation cache for a whole run of the tests: most of their time is XLA compiling the same small policies."""

import os
import shutil
import tempfile

import pytest

CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """Set before anything imports JAX; the workers of pytest-xdist and the engines' processes inherit it.

    Made anew for every run, so that no test can pass on what an older version of the code compiled. Tests of separate
    compilation take the variable out again.
    """
    if CACHE not in os.environ and not hasattr(config, "workerinput"):
        os.environ[CACHE] = config.stash[_OWN] = tempfile.mkdtemp(prefix="isojax-tests-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache that this run made."""
    if _OWN in config.stash:
        shutil.rmtree(config.stash[_OWN], ignore_errors=True)


_OWN = pytest.StashKey[str]()
