"""Skips, with its reason, what the installed JAX can't run."""

import jax
import pytest

from pallas_kernels.seal import SEALING_JAX


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels are sealed by one JAX, which the engine's environment does not have."""
    if jax.__version__ == SEALING_JAX:
        return
    reason = f"kernels are sealed with jax {SEALING_JAX} only, found {jax.__version__}: see `make seal-env`"
    for item in items:
        if item.get_closest_marker("sealing"):
            item.add_marker(pytest.mark.skip(reason=reason))
