"""Operands for the interpreted kernels, and how close their results must be."""

import jax
import jax.numpy as jnp
import numpy as np


def run(program, *operands, races=True):
    # Imports what only the sealing JAX has.
    from interpreted import interpret

    return interpret(program, *operands, races=races)


def normal(seed: int, *shape: int) -> jax.Array:
    # By NumPy, which compiles nothing for a shape; JAX would take a second for each.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16))


def close(found, expected, tolerance=1e-2):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
