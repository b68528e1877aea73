"""Fixtures for tests that need a Hopper card, torch with CUDA and JAX's CUDA plugin."""

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _missing() -> str | None:
    import jax
    import torch

    if jax.__version__ != "0.11.2":
        return f"kernels are sealed with jax 0.11.2 only, found {jax.__version__}"
    if importlib.util.find_spec("jax_plugins") is None:
        return "JAX's CUDA plugin is not installed"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "no Hopper card"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in Path(item.fspath).parents]
    reason = _missing() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def compiler():
    import torch

    from bridge.launcher import Compiler

    return Compiler(torch.device("cuda:0"))
