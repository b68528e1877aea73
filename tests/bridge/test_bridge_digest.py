"""The digest that torch computes is the one that the contract defines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import bridge.digest
from bridge.digest import tensor_lanes, weight_digest
from contracts import weight_digest as digests
from contracts.errors import BadCheckpoint
from contracts.weight_digest import combine, tensor_id_of
from contracts.weight_digest import weight_digest as reference

VECTORS = json.loads(Path(digests.__file__).with_name("weight_digest_vectors.json").read_text(encoding="utf-8"))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 3.4e38])
TENSORS = {
    "fp32": torch.randn(37, 11),
    "bf16": torch.randn(37, 11).to(torch.bfloat16),
    "fp16": torch.randn(5, 3).to(torch.float16),
    "bytes": torch.arange(256).to(torch.uint8),
    "signed": torch.arange(-128, 128).to(torch.int8),
    "special fp32": SPECIAL,
    "special bf16": SPECIAL.to(torch.bfloat16),
    "transposed": torch.randn(20, 30).T,
    "offset": torch.randn(101)[1:],
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(1.5),
}


@pytest.mark.parametrize("name", TENSORS)
def test_equals_the_reference(name):
    tensor = TENSORS[name]
    assert weight_digest({name: tensor}) == reference({name: as_numpy(tensor)})


def test_all_tensors_together_equal_the_reference_in_any_order():
    forward = weight_digest(TENSORS)
    assert forward == weight_digest(dict(reversed(TENSORS.items())))
    assert forward == reference({name: as_numpy(tensor) for name, tensor in TENSORS.items()})


@pytest.mark.parametrize("vector", VECTORS["tensors"], ids=lambda vector: vector["description"])
def test_equals_the_committed_vector(vector):
    words = torch.from_numpy(np.array([int(word, 16) for word in vector["words"]], np.uint32).view(np.int32))
    lanes = tensor_lanes(words, tensor_id_of(vector["tensor"]), vector["first_position"])
    assert [f"{lane:08x}" for lane in lanes] == vector["lanes"]


def test_blocks_and_shards_add_up(monkeypatch):
    tensor = torch.randn(1000)
    whole = tensor_lanes(tensor, tensor_id_of("w"))
    monkeypatch.setattr(bridge.digest, "BLOCK", 64)
    assert tensor_lanes(tensor, tensor_id_of("w")) == whole
    pieces = [tensor_lanes(tensor[:300], tensor_id_of("w")), tensor_lanes(tensor[300:], tensor_id_of("w"), 300)]
    assert combine(pieces) == combine([whole])


def test_a_position_beyond_31_bits_equals_the_reference():
    tensor, first = torch.randn(8), 2**32 - 8
    assert tensor_lanes(tensor, 7, first) == digests.tensor_lanes(digests.words_of(tensor.numpy()), 7, first)


def test_a_tensor_beyond_the_last_position_is_refused():
    with pytest.raises(BadCheckpoint, match="32 bits"):
        tensor_lanes(torch.zeros(8), 7, 2**32 - 7)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[torch.randperm(len(w), generator=torch.Generator().manual_seed(0))],
        lambda w: w.T.contiguous().view(w.shape),
        lambda w: w.to(torch.bfloat16).to(torch.float32),
        lambda w: torch.where(torch.arange(w.numel()).view(w.shape) == 5, -w, w),
    ],
    ids=["permuted rows", "transposed", "rounded", "one sign"],
)
def test_a_changed_tensor_has_another_digest(change):
    weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    assert weight_digest({"w": change(weight)}) != weight_digest({"w": weight})


def test_a_moved_tensor_has_another_digest():
    weight = torch.randn(4, 4)
    assert weight_digest({"a": weight}) != weight_digest({"b": weight})


def test_wide_elements_are_refused():
    with pytest.raises(BadCheckpoint, match="1, 2 or 4 bytes"):
        weight_digest({"w": torch.zeros(2, dtype=torch.float64)})


def test_tritons_lanes_are_the_plain_ones():
    """Its interpreter, in a process of its own since Triton reads that setting when a kernel is declared."""
    pytest.importorskip("triton")
    script = """
import itertools
import torch
from bridge.device_digest import BLOCK, lanes_on_card
from bridge.digest import tensor_lanes
generator = torch.Generator().manual_seed(0)
counts, ids, firsts = (0, 1, BLOCK, 2 * BLOCK + 17), (0, 2**32 - 1, 0x9E3779B9), (0, 2**32 - 3 * BLOCK)
for dtype, count in itertools.product((torch.uint8, torch.int16, torch.int32), counts):
    limits = torch.iinfo(dtype)
    bits = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=torch.int64).to(dtype)
    for tensor_id, first in itertools.product(ids, firsts):
        found = lanes_on_card(bits, tensor_id, first)
        assert found == tensor_lanes(bits, tensor_id, first), (dtype, count, tensor_id, first)
        if count:
            bits[count // 2] ^= 1
            assert all(new != old for new, old in zip(lanes_on_card(bits, tensor_id, first), found, strict=True))
print("equal")
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr[-2000:]
