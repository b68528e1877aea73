"""A run on a card: the shapes that it seals, the cards that it refuses, and gates that stop it."""

from types import SimpleNamespace

import jax
import pytest
from rl_samples import run_config

from contracts.errors import BadConfig, DifferenceFound
from isojax.evidence import gates as gates_module
from isojax.evidence.gates import Gate, GateSuite
from isojax.evidence.proof import Proof
from isojax.kernels import KernelShapes
from isojax.rl import card, engine_defaults


def test_a_run_seals_its_own_shapes():
    config = run_config(
        train={"micro_batch_tokens": 2100}, engine={"settings": {"max_step_tokens": 100, "max_sequences": 24}}
    )
    shapes = card.run_shapes(config, max_position=4096)
    assert shapes.trainer_tokens == (512, 1024, 2048)
    assert shapes.token_buckets == (8, 16, 32, 64, 104)
    assert shapes.head_rows == (8, 16, 24)
    assert (shapes.max_requests, shapes.max_context) == (24, 4096)


def test_a_run_that_says_nothing_gets_the_engines_own_limits():
    shapes = card.run_shapes(run_config(train={"micro_batch_tokens": 128}), max_position=256)
    assert shapes.trainer_tokens == (128,)
    assert shapes.token_buckets[-1] == engine_defaults.DEFAULT_STEP_TOKENS
    assert shapes.head_rows[-1] == engine_defaults.DEFAULT_SEQUENCES


@pytest.mark.parametrize(("asked", "sealed"), [(64, 64), (128, 128), (0, KernelShapes().page_size)])
def test_a_run_seals_the_pages_that_its_engine_is_asked_for(asked, sealed):
    config = run_config(train={"micro_batch_tokens": 128}, engine={"settings": {"page_size": asked}})
    assert card.run_shapes(config, max_position=256).page_size == sealed


def test_pages_that_no_kernel_takes_are_refused_before_anything_is_sealed():
    config = run_config(train={"micro_batch_tokens": 128}, engine={"settings": {"page_size": 24}})
    with pytest.raises(BadConfig, match=r"page_size: found 24.*16, 32"):
        card.run_shapes(config, max_position=256)


def test_a_micro_batch_below_the_heads_block_is_refused():
    with pytest.raises(BadConfig, match=r"micro_batch_tokens.*64.*128 or more on a card"):
        card.run_shapes(run_config(train={"micro_batch_tokens": 64}), max_position=256)


@pytest.mark.parametrize("settings", [{"max_sequences": "many"}, {"max_step_tokens": 0}, {"max_context": -1}])
def test_an_engines_setting_that_is_no_count_is_refused_before_anything_is_sealed(settings):
    (name,) = settings
    config = run_config(train={"micro_batch_tokens": 128}, engine={"settings": settings})
    with pytest.raises(BadConfig, match=rf"engine\.settings\.{name}"):
        card.run_shapes(config, max_position=256)


@pytest.mark.parametrize(
    ("device", "expected"),
    [({"platform": "cpu"}, "cpu"), ({"platform": "gpu", "compute_capability": "9.0"}, "sm90")],
)
def test_the_machine_decides_the_architecture(monkeypatch, device, expected):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**device)])
    assert card.machine_arch() == expected


def test_a_card_without_kernels_is_refused(monkeypatch):
    device = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(BadConfig, match=r"A100, compute capability 8\.0.*Hopper"):
        card.machine_arch()


def test_nothing_is_written_unless_every_gate_passes(monkeypatch, tmp_path, capsys):
    def fails() -> str:
        raise DifferenceFound(field="row 3", found=1, allowed=0, reason="Planted.")

    written = []
    monkeypatch.setattr(gates_module, "write_proof", lambda folder, proof: written.append((folder, proof)))
    proof = Proof("a card", "1.0")
    good, bad = (Gate(name, "sm90", "claim", check) for name, check in (("good", lambda: "seen"), ("bad", fails)))
    for gates in ((good, bad), (good,)):
        suite = GateSuite("sm90", gates, proof=lambda: proof)
        asked = []
        monkeypatch.setattr(
            card, "select_suites", lambda *given, suite=suite, asked=asked: asked.append(given) or [suite]
        )
        if bad in gates:
            with pytest.raises(DifferenceFound, match=r"bad.*row 3"):
                card.prove_for_run(tmp_path, "sm90", {"dp": 1, "fsdp": 2})
            assert not written
        else:
            card.prove_for_run(tmp_path, "sm90", {"dp": 1, "fsdp": 2})
        assert asked == [("sm90", tmp_path, {"fsdp": 2})]
    assert written == [(tmp_path, proof)]
    assert "good" in capsys.readouterr().err
