"""Views of torch memory in JAX and of JAX results in torch, without a copy wherever memory allows it."""

import weakref
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from bridge.jax_api import backends_are_initialized, export_capsule, import_capsule

ALIGNMENT = 64
"""Bytes. XLA:CPU copies a buffer that is aligned to less, so a view of such memory would go stale."""

JAX_DTYPES: dict[torch.dtype, jnp.dtype] = {
    torch.bfloat16: jnp.dtype("bfloat16"),
    torch.float16: jnp.dtype("float16"),
    torch.float32: jnp.dtype("float32"),
    torch.int8: jnp.dtype("int8"),
    torch.int16: jnp.dtype("int16"),
    torch.int32: jnp.dtype("int32"),
    torch.uint8: jnp.dtype("uint8"),
    torch.uint32: jnp.dtype("uint32"),
    torch.bool: jnp.dtype("bool"),
}
TORCH_DTYPES: dict[jnp.dtype, torch.dtype] = {numpy: torch_dtype for torch_dtype, numpy in JAX_DTYPES.items()}


_INTEGERS = {2: torch.int16, 4: torch.int32}


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, because comparing floats hides signed zeros and finds NaN unlike itself."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def jax_dtype(dtype: torch.dtype) -> jnp.dtype:
    """The JAX dtype of a torch dtype; int64 becomes int32, the only index type that policies use.

    Raises TypeError for a dtype that no region takes (float64, complex, float8).
    """
    if dtype is torch.int64:
        return JAX_DTYPES[torch.int32]
    if dtype not in JAX_DTYPES:
        raise TypeError(f"{dtype} has no counterpart among the region dtypes {[str(kind) for kind in JAX_DTYPES]}")
    return JAX_DTYPES[dtype]


def torch_dtype(dtype: jnp.dtype) -> torch.dtype:
    """The torch dtype of a JAX dtype. Raises TypeError for one that no region uses."""
    dtype = jnp.dtype(dtype)
    if dtype not in TORCH_DTYPES:
        raise TypeError(f"{dtype} has no counterpart among the region dtypes {[str(kind) for kind in TORCH_DTYPES]}")
    return TORCH_DTYPES[dtype]


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype's name as contracts write it, for example bfloat16."""
    return str(dtype).removeprefix("torch.")


def dispatch_synchronously() -> bool:
    """Asks XLA:CPU to run every call on the calling thread; returns False if it is too late to ask.

    It saves two thread switches a call, 25 to 40 microseconds. It works only before JAX has started its CPU client, so
    it belongs at the start of an engine's process. It changes no result: the ops wait for theirs in either mode.
    """
    if backends_are_initialized():
        return False
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return True


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 tensor (vLLM's tokens and positions) as int32; raises OverflowError if a value does not fit."""
    narrowed = tensor.to(torch.int32)
    if not torch.equal(narrowed.to(torch.int64), tensor):
        raise OverflowError("an int64 operand holds a value beyond int32; token ids and positions must fit in int32")
    return narrowed


def is_viewable(tensor: torch.Tensor) -> bool:
    """Whether JAX's CPU client can see this memory itself: contiguous, 64-byte aligned, of a dtype that JAX has."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNMENT == 0
        and tensor.dtype in JAX_DTYPES
    )


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A JAX array of a CPU tensor: its own memory if `is_viewable`, else a contiguous aligned copy made here.

    The array keeps the memory alive. Values are read when a computation that takes the array runs, so whoever writes to
    the tensor must first wait for that computation; the ops here wait before they return. Raises TypeError for a dtype
    that no region takes, OverflowError for an int64 value beyond int32.
    """
    if tensor.dtype is torch.int64:
        tensor = as_int32(tensor)
    elif tensor.dtype not in JAX_DTYPES:
        jax_dtype(tensor.dtype)  # Raises the explanation.
    if tensor.data_ptr() % ALIGNMENT or not tensor.is_contiguous():
        # torch's CPU allocator aligns to 64 bytes, so a fresh tensor is always viewable.
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return import_capsule(to_dlpack(tensor))


def to_torch(array: jax.Array) -> torch.Tensor:
    """A tensor over a JAX result's memory, which lives as long as the tensor; waits until the values are there."""
    array.block_until_ready()
    return from_dlpack(export_capsule(array))


class SharedViews:
    """JAX views of long-lived torch memory (weights, KV caches), made once and found again by address.

    A view reads live memory: an in-place update (weight sync, a cache write) is seen by the next call. The key is
    (address, shape, dtype), and a view keeps its memory alive, so an address cannot come to mean another tensor while
    its view is kept. A view goes when the tensor object that it was added for goes. What it cannot follow is memory
    that is replaced: a parameter that is assigned another tensor's memory is simply not found until it is added again.
    Storage that is resized in place (`untyped_storage().resize_`) must be discarded first.
    """

    def __init__(self) -> None:
        self._views: dict[tuple[int, torch.Size, torch.dtype], jax.Array] = {}
        self._owner: dict[tuple[int, torch.Size, torch.dtype], int] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._views)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keeps a view of each tensor that JAX can see in place; others are converted at every call instead."""
        for tensor in tensors:
            if is_viewable(tensor) and tensor.numel():
                key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
                self._added += 1
                self._owner[key] = self._added
                # A view of an alias: one of the tensor itself would keep that tensor object alive for ever.
                self._views[key] = to_jax(tensor.detach())
                weakref.finalize(tensor, self._forget, key, self._added).atexit = False

    def discard(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forgets the views of these tensors, so that their memory can be freed or resized."""
        for tensor in tensors:
            self._views.pop((tensor.data_ptr(), tensor.shape, tensor.dtype), None)

    def to_jax(self, tensor: torch.Tensor) -> jax.Array:
        """The kept view of exactly this memory if there is one, else a fresh one (see the function `to_jax`)."""
        view = self._views.get((tensor.data_ptr(), tensor.shape, tensor.dtype))
        return view if view is not None and tensor.is_contiguous() else to_jax(tensor)

    def _forget(self, key: tuple[int, torch.Size, torch.dtype], added: int) -> None:
        # Another tensor object over the same memory may have been added since.
        if self._owner.get(key) == added:
            self._views.pop(key, None)
            del self._owner[key]


shared_views = SharedViews()
"""The process's views: every op looks here before it converts an operand."""
