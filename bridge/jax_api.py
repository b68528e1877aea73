"""The parts of JAX without a public, fast form that the bridge needs, and that move between versions, in one place."""

import multiprocessing
from functools import cache

import jax
from jax._src import xla_bridge
from jax._src.lib import _jax, jaxlib_extension_version


@cache
def cpu_device() -> jax.Device:
    """This process's first CPU device."""
    return jax.local_devices(backend="cpu")[0]


def backends_are_initialized() -> bool:
    """Whether JAX has started its clients, after which their settings are fixed."""
    return xla_bridge.backends_are_initialized()


def keep_off_the_card() -> None:
    """Keeps JAX on the CPU in an engine's own process, whose sealed kernels need no XLA client on the card.

    In the trainer's process JAX owns the card already and is left alone.
    """
    if multiprocessing.parent_process() is not None and not backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


if jaxlib_extension_version >= 467:

    def import_capsule(capsule: object) -> jax.Array:
        """A JAX array over the CPU memory of a DLPack capsule."""
        return _jax.dlpack_managed_tensor_to_buffer(capsule, cpu_device(), None, None, 1)

else:

    def import_capsule(capsule: object) -> jax.Array:
        """A JAX array over the CPU memory of a DLPack capsule."""
        # jax.dlpack.from_dlpack does the same through several layers of checks: 41 microseconds instead of 5.
        return _jax.dlpack_managed_tensor_to_buffer(capsule, cpu_device(), None)


def export_capsule(array: jax.Array) -> object:
    """A DLPack capsule over an array's memory, which the capsule keeps alive."""
    return _jax.buffer_to_dlpack_managed_tensor(array, stream=None)
