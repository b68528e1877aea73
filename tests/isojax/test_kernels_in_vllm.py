"""vLLM itself, started by its own class, refuses a policy whose kernels were tampered with before it loads a weight."""

from pathlib import Path

import pytest
from bundle_damage import damages
from kernel_samples import sealed_folder

from contracts import load_contract, save_contract

pytestmark = pytest.mark.engine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that claims a card, on a machine that is taken for one."""
    from bridge import settings

    monkeypatch.setattr(settings, "_check_platform", lambda contract: None)
    folder = sealed_folder(tmp_path / "policy")
    contract = load_contract(folder)
    claims = contract.claims.model_copy(update={"state": "proved", "device_kinds": ("NVIDIA H200",)})
    save_contract(contract.replaced(claims=claims), folder)
    return folder


@pytest.mark.parametrize("name", damages())
def test_a_damaged_policy_is_refused_at_the_start(folder: Path, name: str) -> None:
    from bridge.start import EngineOptions, start_vllm

    damage = damages()[name]
    damage.apply(folder)
    with pytest.raises(damage.refusal, match=damage.says):
        start_vllm(folder, load_contract(folder), EngineOptions(max_context=64))
