"""A policy's sealed kernels: which calls it makes, sealing them, and reading them back against a contract."""

from isojax.kernels.load import KERNELS_FOLDER, load_kernels
from isojax.kernels.names import kernel_digests
from isojax.kernels.packing import packing_of
from pallas_kernels.kernel_shapes import KernelShapes
from pallas_kernels.store import Bundle

__all__ = ["KERNELS_FOLDER", "Bundle", "KernelShapes", "kernel_digests", "load_kernels", "packing_of"]
