"""The weight digest on a card: one kernel that reads every weight once gives the contract's lanes."""

import time

import ml_dtypes
import pytest
import torch

from bridge.digest import tensor_lanes
from contracts import weight_digest as digests

# Bytes a second that a digest must reach at least: it reads each weight once.
LEAST_RATE = 0.5e12


@pytest.mark.parametrize("count", [1, 8192, 100_003, 2**24 + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lanes_are_the_contracts(count, dtype):
    tensor = torch.randn(count, device="cuda").to(dtype)
    host = tensor.cpu()
    array = host.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype is torch.bfloat16 else host.numpy()
    expected = digests.tensor_lanes(digests.words_of(array), 0x9E3779B9, 5)
    assert tensor_lanes(tensor, 0x9E3779B9, 5) == expected
    tensor[count // 2] = -tensor[count // 2]
    assert all(new != old for new, old in zip(tensor_lanes(tensor, 0x9E3779B9, 5), expected, strict=True))


def test_a_large_tensor_can_take_as_long_as_reading_it_does():
    tensor = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    tensor_lanes(tensor, 1)
    seconds = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        tensor_lanes(tensor, 1)
        seconds.append(time.perf_counter() - start)
    # The fastest: other tests may have the card meanwhile.
    rate = tensor.nbytes / min(seconds)
    print(f"{rate / 1e12:.2f} TB/s")
    assert rate > LEAST_RATE
