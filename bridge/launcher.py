"""Compiles sealed modules without an XLA client and launches them on torch's current stream."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from contracts.errors import LaunchRefused, ToolchainMismatch
from pallas_kernels.program import Buffer
from pallas_kernels.seal import ALIGNMENT, ARCHITECTURE, SealedModule, SealedProgram

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
}

_LaunchFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


@dataclasses.dataclass(frozen=True)
class CompiledModule:
    """Machine code for one sealed module, loaded for the life of the process.

    It is never unloaded: captured CUDA graphs hold its address, and nothing says when the last of them is gone.
    """

    sha256: str
    function: int
    launch: Callable[..., None]


class Compiler:
    """Compiles sealed modules for one card, each only once a process.

    Goes through ``MosaicGpuCompile``, which JAX's CUDA plugin exports, so trainer and engine run one compiler over the
    same bytes. Safe to use from several threads.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compile = _plugin().MosaicGpuCompile
        self._compile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        self._compile.restype = ctypes.POINTER(ctypes.c_void_p)
        self._done: dict[str, CompiledModule] = {}
        self._lock = threading.Lock()
        self._check_card()

    def _check_card(self) -> None:
        major, minor = torch.cuda.get_device_capability(self.device)
        if (major, minor) != (9, 0):
            raise ToolchainMismatch(
                field="device.compute_capability",
                found=f"{major}.{minor} ({torch.cuda.get_device_name(self.device)})",
                allowed=f"9.0 ({ARCHITECTURE})",
                reason="The sealed modules hold wgmma and TMA instructions of that architecture only.",
            )

    def compile(self, sealed: SealedModule) -> CompiledModule:
        """Raises LaunchRefused where the compiler returns nothing."""
        digest = sealed.sha256
        if (found := self._done.get(digest)) is not None:
            return found
        module = self.compile_anew(sealed)
        with self._lock:
            return self._done.setdefault(digest, module)

    def compile_anew(self, sealed: SealedModule) -> CompiledModule:
        """Compiles also what is compiled already, to see how. Raises LaunchRefused."""
        # The module is loaded into the calling thread's current CUDA context, which a new thread does not have yet.
        torch.cuda.set_device(self.device)
        torch.cuda.current_stream(self.device).synchronize()
        compiled = self._compile(sealed.module, len(sealed.module))
        if not compiled:
            raise LaunchRefused(
                field=f"kernel {sealed.name} {sealed.sha256}",
                found="a null pointer from MosaicGpuCompile",
                allowed="a compiled module",
                reason="The plugin gives no message. Usual causes: no CUDA context in this thread, libdevice or ptxas "
                "not found, or more shared memory than the card has. MOSAIC_GPU_DUMP_PTX=1 and "
                "MOSAIC_GPU_DUMP_PTXAS=1 show how far it came.",
            )
        return CompiledModule(sealed.sha256, int(compiled[0]), _LaunchFunction(compiled[1]))

    def compile_all(
        self, programs: Iterable[SealedProgram], *, threads: int = 8, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compiles every module of ``programs`` in threads; ``progress(done, total)`` is called after each."""
        modules = list({module.sha256: module for program in programs for module in program.modules}.values())
        with ThreadPoolExecutor(threads) as pool:
            for done, _ in enumerate(pool.map(self.compile, modules), 1):
                if progress is not None:
                    progress(done, len(modules))


class Launcher:
    """A region's sealed program, ready to run on torch tensors.

    Checks every tensor against the manifest first, since a launch that does not fit it aborts the process. Results and
    scratch come from torch's allocator, so a CUDA graph that captures a call owns them like any other tensor.
    """

    def __init__(self, program: SealedProgram, compiler: Compiler) -> None:
        self.program = program
        self.device = compiler.device
        # A number, since comparing devices and asking torch for a stream object cost more than the launch itself.
        self._device_index = -1 if self.device.type == "cpu" else self.device.index
        self.digests = program.digests
        self._operands = tuple(
            (name, *_expected(program.buffers[name]), program.buffers[name].leading_at_most)
            for name in program.operands
        )
        inner = [name for name in program.buffers if name not in program.operands]
        self._allocated = tuple((name, *_expected(program.buffers[name])) for name in inner)
        slots = {name: slot for slot, name in enumerate((*program.operands, *inner))}
        self._results = tuple(slots[name] for name in program.results)
        self._steps = tuple(
            (
                compiler.compile(module),
                tuple(slots[name] for name in (*module.operands, *module.results)),
                (ctypes.c_void_p * (len(module.operands) + len(module.results)))(),
            )
            for module in program.modules
        )

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs on torch's current stream. Raises LaunchRefused naming the tensor that does not fit."""
        if len(operands) != len(self._operands):
            self._refuse("operands", len(operands), len(self._operands), "The region takes a fixed list of tensors.")
        tensors = [*operands]
        addresses = []
        for tensor, (name, shape, dtype, at_most) in zip(operands, self._operands, strict=True):
            address = tensor.data_ptr()
            if (
                (tensor.shape != shape and not (at_most and _fits(tensor.shape, shape)))
                or tensor.dtype is not dtype
                or tensor.get_device() != self._device_index
                or not tensor.is_contiguous()
                or address % ALIGNMENT
            ):
                self._explain(tensor, name, shape, dtype, at_most)
            addresses.append(address)
        for _, shape, dtype in self._allocated:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        stream = raw_stream(self._device_index)
        for module, used, pointers in self._steps:
            for position, slot in enumerate(used):
                pointers[position] = addresses[slot]
            module.launch(module.function, stream, pointers)
        return tuple([tensors[slot] for slot in self._results])

    def _explain(self, tensor: torch.Tensor, name: str, shape: torch.Size, dtype: torch.dtype, at_most: bool) -> None:
        if at_most and not _fits(tensor.shape, shape):
            allowed_shape: object = f"{tuple(shape)}, or fewer of the first"
        else:
            allowed_shape = tuple(tensor.shape) if at_most else tuple(shape)
        for what, found, allowed in (
            ("shape", tuple(tensor.shape), allowed_shape),
            ("dtype", tensor.dtype, dtype),
            ("device", tensor.device, self.device),
            ("strides", tensor.stride(), "dense, row-major" if not tensor.is_contiguous() else tensor.stride()),
            ("address", f"{tensor.data_ptr() % ALIGNMENT} modulo {ALIGNMENT}", f"0 modulo {ALIGNMENT}"),
        ):
            if found != allowed:
                self._refuse(f"{name}.{what}", found, allowed, "The sealed kernel was lowered for this and no other.")

    def _refuse(self, field: str, found: object, allowed: object, reason: str) -> None:
        raise LaunchRefused(field=f"{self.program.region}.{field}", found=found, allowed=allowed, reason=reason)


def raw_stream(device_index: int) -> int:
    """The handle of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def _fits(found: torch.Size, bound: torch.Size) -> bool:
    """Whether a buffer whose first size is a bound takes this shape; its kernels address only what others name."""
    return len(found) == len(bound) and 0 < found[0] <= bound[0] and found[1:] == bound[1:]


def _expected(buffer: Buffer) -> tuple[torch.Size, torch.dtype]:
    return torch.Size(buffer.shape), _DTYPES[buffer.dtype]


def _plugin() -> Any:
    """JAX's CUDA plugin, loaded as a plain library; no XLA client is created."""
    # This import sets the paths at which the plugin's compiler looks for libdevice, ptxas and Mosaic's runtime.
    import jax.experimental.mosaic.gpu  # noqa: F401

    try:
        import jax_plugins.xla_cuda13 as plugin
    except ImportError as error:
        raise ToolchainMismatch(
            field="toolchain.jax_cuda13_plugin",
            found="not installed",
            allowed="jax[cuda13]==0.11.2",
            reason="Sealed kernels are compiled by the same compiler as the trainer's, which the plugin exports.",
        ) from error
    return ctypes.CDLL(plugin._get_library_path())
