"""Memory: what a card must hold is reckoned before anything starts, and what was held is in the metrics."""

import jax
import numpy as np
import pytest
from rl_samples import run_config, small_policy

from contracts.errors import BadConfig
from isojax.rl import assemble
from isojax.rl.memory import memory_marks
from isojax.rl.memory_split import memory_split

GIB = 2**30
SHAPES = {
    "layers.down": jax.ShapeDtypeStruct((8, 256, 2**20), np.dtype("bfloat16")),
    "embed": jax.ShapeDtypeStruct((2**31 // 2**10, 2**10), np.dtype("bfloat16")),
}
"""2^31 elements each, 4 GiB: 2^32 together."""


def test_the_split_adds_up():
    split = memory_split(SHAPES, kv_cache_bytes=10 * GIB, reserve_bytes=8 * GIB, with_reference=True)
    # 2^32 elements are 8 GiB in bf16, 16 in float32.
    assert split.weights == 16 * GIB
    assert split.reference == 8 * GIB
    assert split.master == 16 * GIB
    assert split.moments == 32 * GIB
    assert split.gradients == 24 * GIB
    assert split.engine_weights == 8 * GIB
    assert split.trainer == 96 * GIB
    assert split.total == 122 * GIB
    split.require_fit(122 * GIB)
    split.require_fit(122 * GIB, trainer_bytes=96 * GIB)
    without = memory_split(SHAPES, kv_cache_bytes=10 * GIB, reserve_bytes=8 * GIB, with_reference=False)
    assert without.total == 114 * GIB


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    split = memory_split(SHAPES, kv_cache_bytes=10 * GIB, reserve_bytes=8 * GIB, with_reference=False)
    with pytest.raises(BadConfig) as refusal:
        split.require_fit(80 * GIB)
    text = str(refusal.value)
    assert "weights twice 16.00 + float32 master 16.00 + Adam moments 32.00 + gradients 24.00" in text
    assert "engine's weights 8.00 + KV cache 10.00 + reserve 8.00 = 114.00 GiB" in text
    assert "at most the card's 80.00 GiB" in text
    assert "34.00 GiB are missing" in text


def test_a_trainer_that_jax_gives_too_little_is_refused():
    split = memory_split(SHAPES, kv_cache_bytes=10 * GIB, reserve_bytes=8 * GIB, with_reference=False)
    with pytest.raises(BadConfig, match=r"88\.00 GiB of the trainer's own.*at most 87\.00 GiB, the share that JAX"):
        split.require_fit(140 * GIB, trainer_bytes=87 * GIB)


class _OnACard:
    """An engine that would run on a card of so many bytes."""

    def __init__(self, size):
        self.device_bytes = lambda: size


def test_before_an_engine_starts_its_card_is_asked(monkeypatch):
    config, policy = run_config(), small_policy()
    needed = memory_split(
        policy.parameter_shapes,
        kv_cache_bytes=1 << 30,
        reserve_bytes=config.engine.memory.reserve_bytes,
        with_reference=False,
    ).total
    for size in (None, needed):
        monkeypatch.setattr(assemble, "engine_class", lambda name, size=size: _OnACard(size))
        assemble._require_memory(config, policy)
    monkeypatch.setattr(assemble, "engine_class", lambda name: _OnACard(needed - 1))
    with pytest.raises(BadConfig, match=r"engine\.memory: found weights twice"):
        assemble._require_memory(config, policy)
    smaller = run_config(engine={"memory": {"reserve_bytes": config.engine.memory.reserve_bytes - 1}})
    assemble._require_memory(smaller, policy)
    larger = run_config(engine={"settings": {"kv_cache_bytes": 2 << 30}})
    with pytest.raises(BadConfig, match=r"KV cache 2\.00"):
        assemble._require_memory(larger, policy)


def test_an_engine_that_knows_no_card_is_not_asked(monkeypatch):
    monkeypatch.setattr(assemble, "engine_class", lambda name: object)
    assemble._require_memory(run_config(), small_policy())


def test_the_marks_never_fall():
    before = memory_marks()
    block = np.ones(64 << 20, np.uint8)
    during = memory_marks()
    del block
    after = memory_marks()
    assert before.process <= during.process <= after.process
    assert during.process > 64 << 20
    assert before.device is None
