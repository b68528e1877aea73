"""A step's operands from vLLM's device tensors: padding is inert, and attention over them is the CPU engine's own."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from step_samples import PAGE, REQUEST_PAGES, REQUESTS, Step

import bridge.torch_ops  # noqa: F401  (it registers the regions' ops)
from bridge import gpu_attention
from bridge.attention_backend import CachedAttention, StepMetadata
from bridge.gpu_attention import GpuCachedAttention, GpuStepMetadata
from bridge.step_inputs import StepInputs, StepOperands, smallest_bucket
from contracts.errors import LaunchRefused

BUCKETS = (8, 16)


def _inputs() -> StepInputs:
    return StepInputs(BUCKETS, REQUESTS, REQUEST_PAGES, PAGE, torch.device("cpu"))


def _prepare(inputs: StepInputs, step: Step) -> StepOperands:
    return inputs.prepare(step.ids, step.positions, step.batch)


@pytest.mark.parametrize(
    ("step", "bucket"),
    [
        (Step([(0, 5), (7, 1), (2, 3)]), 16),
        (Step([(3, 1), (7, 1)], tokens=8, requests=4), 8),
        (Step([(0, 8)]), 8),
        (Step([(5, 2)], tokens=16, requests=4), 16),
    ],
)
def test_padding_is_inert_and_real_tokens_keep_their_places(step, bucket):
    inputs = _inputs()
    # A longer step before, whose rows must not show.
    _prepare(inputs, Step([(0, 9), (1, 7)]))
    operands = _prepare(inputs, step)
    real = step.real
    assert operands.tokens_T.shape == (bucket,)
    assert operands.tokens_T.tolist() == step.ids[:real].tolist() + [0] * (bucket - real)
    assert operands.positions_T.tolist() == step.positions[:real].tolist() + [0] * (bucket - real)
    assert operands.request_of_token_T.tolist() == step.owner[:real].tolist() + [-1] * (bucket - real)
    for field in dataclasses.fields(operands):
        assert getattr(operands, field.name).dtype == torch.int32
    # Keys of slot s of block b lie in page 2 b of the cache; padding writes nowhere.
    slots = step.batch.slot_mapping[:real]
    expected = slots // PAGE * 2 * PAGE + slots % PAGE
    assert operands.slots_T.tolist() == expected.tolist() + [-1] * (bucket - real)
    assert torch.equal(operands.page_table_RP[: len(step.table)], 2 * step.table[:, :REQUEST_PAGES])


def test_tritons_operands_are_the_plain_ones():
    """Its interpreter, in a process of its own since Triton reads that setting when a kernel is declared."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, str(Path(__file__).with_name("step_inputs_on_triton.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr


def test_the_same_memory_serves_every_step_of_a_bucket():
    inputs = _inputs()
    first, second = (_prepare(inputs, step) for step in (Step([(0, 3)]), Step([(2, 5), (0, 1)])))
    for name in ("tokens_T", "positions_T", "request_of_token_T", "slots_T", "page_table_RP"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_a_step_beyond_the_largest_bucket_is_refused_by_name():
    assert smallest_bucket(BUCKETS, 9, "tokens of a step") == 16
    with pytest.raises(LaunchRefused, match="tokens of a step: found 17; allowed: at most 16"):
        _inputs().bucket_of(17)


def test_the_cards_ops_write_and_read_the_cache_as_the_cpu_engine_does(monkeypatch):
    H, K, D = 4, 2, 8
    step = Step([(0, 3), (6, 2)], tokens=8, requests=3)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    qkv, cos_sin, norms = normal(8, (H + 2 * K) * D), torch.rand(8, D, generator=generator), (normal(D), normal(D))
    cache = normal(2 * step.blocks, PAGE, K, D)
    inputs = _inputs()
    operands = _prepare(inputs, step)
    on_card, on_cpu = GpuCachedAttention(D**-0.5, 512), CachedAttention(D**-0.5, 512)
    caches = cache.clone(), cache.clone()
    for attention, pages in zip((on_card, on_cpu), caches, strict=True):
        attention.bind(pages)
    parameters = {"key_heads": K, "eps": 1e-6}
    given = GpuStepMetadata(step.batch, decode=False, operands=operands)
    monkeypatch.setattr(gpu_attention, "step_metadata", lambda: given)
    found = on_card.attend(on_card.write(qkv, cos_sin, *norms, **parameters), operands.positions_T)
    slots = operands.slots_T[: step.real].long()
    reference = StepMetadata(step.real, slots, operands.page_table_RP, operands.request_of_token_T, False)
    heads = torch.ops.isojax.qk_norm_rope(qkv, cos_sin, *norms, **parameters)
    expected = on_cpu.forward(None, *heads, cache, reference, positions=operands.positions_T)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert bool(found[: step.real].float().abs().sum(2).all())
    assert bool((found[step.real :] == 0).all())
    assert torch.equal(caches[0].view(torch.int16), caches[1].view(torch.int16))
    assert not torch.equal(caches[0][2:].view(torch.int16), cache[2:].view(torch.int16))
