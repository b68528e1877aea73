"""One engine a module, for the tests that need a running one and no special policy."""

import pytest
from engine_samples import running_engine


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """vLLM on a tiny bf16 policy with an untied head."""
    with running_engine(tmp_path_factory.mktemp("policy") / "exported", "bfloat16", tied=False) as engine:
        yield engine


@pytest.fixture
def original_weights(running):
    """The policy's own weights and an empty prefix cache at the start of a test."""
    running.engine.sync(running.params)
