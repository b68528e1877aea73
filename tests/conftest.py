"""For all tests: one compilation cache a run, and skips, with their reason, of what the installed JAX can't run."""

import os
import shutil
import tempfile

import pytest

CACHE = "JAX_COMPILATION_CACHE_DIR"
INTERPRETER_THREADS = "8"


def pytest_configure(config: pytest.Config) -> None:
    """Set before anything imports JAX; the workers of pytest-xdist and the engines' processes inherit it.

    Most of the tests' time is XLA compiling the same small policies. Made anew for every run, so that no test can pass
    on what an older version of the code compiled. Tests of separate compilation take the variable out again.
    """
    if CACHE not in os.environ and not hasattr(config, "workerinput"):
        os.environ[CACHE] = config.stash[_OWN] = tempfile.mkdtemp(prefix="isojax-tests-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache that this run made."""
    if _OWN in config.stash:
        shutil.rmtree(config.stash[_OWN], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest files first, or one worker would end the run alone; kernels are sealed by a JAX engines do not have."""
    items.sort(key=_file_seconds, reverse=True)
    import jax

    from pallas_kernels.seal import SEALING_JAX

    if jax.__version__ == SEALING_JAX:
        # Before the first computation. Pallas's interpreter runs a block's warpgroups on threads of XLA's pool, which
        # wait there at barriers: with fewer threads than warpgroups, as on two CPUs, it can wait for ever.
        os.environ.setdefault("NPROC", INTERPRETER_THREADS)
        if not any("gpu" in item.path.parts for item in items):
            # Here a CPU computes the interpreter and what results are close to, and most of that time is LLVM's.
            os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        return
    reason = f"kernels are sealed with jax {SEALING_JAX} only, found {jax.__version__}: see `make seal-env`"
    for item in items:
        if item.get_closest_marker("sealing"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _file_seconds(item: pytest.Item) -> int:
    marker = item.get_closest_marker("long_file")
    return marker.args[0] if marker else 0


_OWN = pytest.StashKey[str]()
