"""Tensors seen from JAX and JAX results seen from torch: no copy where memory allows it, the same values always."""

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge.arrays import ALIGNMENT, SharedViews, is_viewable, jax_dtype, shared_views, to_jax, to_torch, torch_dtype

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def bits(values: torch.Tensor | jax.Array) -> bytes:
    """The bit pattern, whatever the dtype."""
    tensor = to_torch(values) if isinstance(values, jax.Array) else values
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def misaligned(values: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 64."""
    buffer = torch.empty(values.numel() + ALIGNMENT, dtype=values.dtype)
    start = next(index for index in range(1, ALIGNMENT) if buffer[index:].data_ptr() % ALIGNMENT)
    copy = buffer[start : start + values.numel()].view(values.shape)
    copy.copy_(values)
    assert copy.data_ptr() % ALIGNMENT
    return copy


@pytest.mark.parametrize("dtype", DTYPES)
def test_aligned_memory_is_shared_both_ways(dtype):
    tensor = torch.arange(48).reshape(6, 8).to(dtype)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.dtype == jax_dtype(dtype)
    assert torch_dtype(array.dtype) is dtype
    assert bits(array) == bits(tensor)
    assert to_torch(array).data_ptr() == tensor.data_ptr()


def test_misaligned_memory_is_copied_with_the_same_values():
    tensor = misaligned(torch.randn(5, 7).to(torch.bfloat16))
    assert not is_viewable(tensor)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    assert bits(array) == bits(tensor)


@pytest.mark.parametrize("cut", [lambda x: x[:, ::2], lambda x: x.T, lambda x: x[1:, 3:], lambda x: x[0].expand(4, -1)])
def test_strided_memory_is_copied_with_the_same_values(cut):
    tensor = cut(torch.randn(8, 16))
    assert not is_viewable(tensor)
    assert np.array_equal(np.asarray(to_jax(tensor)), tensor.numpy())


def test_int64_arrives_as_int32():
    tensor = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
    array = to_jax(tensor)
    assert array.dtype == jnp.int32
    assert array.tolist() == tensor.tolist()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32])
def test_int64_beyond_int32_is_refused_and_not_wrapped(value):
    with pytest.raises(OverflowError, match="int32"):
        to_jax(torch.tensor([3, value]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_without_a_region_is_refused(dtype):
    with pytest.raises(TypeError, match="counterpart"):
        jax_dtype(dtype)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty_tensors_pass(shape):
    assert to_jax(torch.empty(shape)).shape == shape
    assert to_torch(jnp.zeros(shape)).shape == shape


def test_a_result_outlives_the_array_and_may_be_written():
    double = jax.jit(lambda x: x * 2)
    tensors = []
    for index in range(50):
        source = torch.full((1000,), float(index))
        tensors.append(to_torch(double(to_jax(source))))
        del source
    gc.collect()
    for index, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert tensor.eq(2.0 * index).all()
        tensor.zero_()


def test_an_input_may_be_overwritten_as_soon_as_the_result_is_in_torch():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y + x, x))
    source = torch.ones(200_000)
    for step in range(5):
        source.fill_(step)
        result = to_torch(slow(to_jax(source)))
        source.fill_(-1)
        assert result.eq(51.0 * step).all()


def test_a_shared_view_sees_writes_in_place():
    views = SharedViews()
    weight = torch.zeros(32, 16, dtype=torch.bfloat16)
    views.add([weight])
    view = views.to_jax(weight)
    assert views.to_jax(weight) is view
    read = jax.jit(lambda x: x * 1)
    weight.fill_(3)
    assert to_torch(read(view)).eq(3).all()


def test_a_shared_view_is_not_taken_for_other_memory_at_its_address():
    views = SharedViews()
    square = torch.randn(16, 16)
    views.add([square])
    kept = views.to_jax(square)
    for other in (square[:8], square.view(-1), square.view(torch.int32), square.T):
        assert views.to_jax(other) is not kept
        assert bits(views.to_jax(other)) == bits(other)


def test_memory_that_jax_cannot_share_is_never_kept():
    # A kept copy would be stale after the next weight update.
    views = SharedViews()
    weight = misaligned(torch.zeros(4, 4))
    views.add([weight])
    assert len(views) == 0
    weight.fill_(5)
    assert to_torch(views.to_jax(weight)).eq(5).all()


def test_a_view_goes_with_the_tensor_it_was_made_for():
    views = SharedViews()
    weight = torch.randn(64, 64)
    other = weight.detach()
    views.add([weight])
    del weight
    gc.collect()
    assert len(views) == 0
    views.add([other])
    assert len(views) == 1
    views.discard([other])
    assert len(views) == 0


def test_a_view_added_anew_survives_the_end_of_an_earlier_tensor_object():
    views = SharedViews()
    first = torch.randn(64, 64)
    second = first.detach()
    views.add([first])
    views.add([second])
    del first
    gc.collect()
    assert len(views) == 1


def test_a_process_with_shared_views_ends_cleanly_and_fixes_its_dispatch_before_jax_runs():
    program = """
import torch, jax
from bridge.arrays import dispatch_synchronously, shared_views, to_jax, to_torch
assert dispatch_synchronously()
weight = torch.ones(64, 64)
shared_views.add([weight])
result = to_torch(jax.jit(lambda x: x + 1)(shared_views.to_jax(weight)))
assert result.eq(2).all()
assert not dispatch_synchronously()
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_the_process_wide_views_are_empty_of_dead_tensors():
    before = len(shared_views)
    shared_views.add([torch.randn(8, 8) for _ in range(10)])
    gc.collect()
    assert len(shared_views) == before
