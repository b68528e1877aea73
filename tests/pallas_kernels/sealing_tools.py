"""Shared by the sealing tests: what they need, and a small program."""

import jax
import pytest

needs_sealing_jax = pytest.mark.skipif(
    jax.__version__ != "0.11.2", reason=f"kernels are sealed with jax 0.11.2 only, found {jax.__version__}"
)


def small_program(leaves: int = 2):
    """A matmul of 8 tokens, small enough to lower in a second."""
    from pallas_kernels.matmul.hopper import matmul_program

    return matmul_program(8, 128, 256, leaves=leaves)
