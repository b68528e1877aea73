"""The parts of JAX without a public, fast form that the bridge needs, and that move between versions, in one place."""

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
