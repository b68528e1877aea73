"""The matrix product of backward passes: fp32 on a CPU; on CUDA the operands' own dtype, summed in fp32."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.by_platform import by_platform


def _numbers(a_axis: int, b_axis: int) -> lax.DotDimensionNumbers:
    return ((a_axis,), (b_axis,)), ((), ())


def dot_cpu(a: jax.Array, b: jax.Array, *, a_axis: int, b_axis: int, dtype: str) -> tuple[jax.Array]:
    """Operands widened first: XLA:CPU has no fast product of bf16."""
    wide = lax.dot_general(a.astype(jnp.float32), b.astype(jnp.float32), _numbers(a_axis, b_axis))
    return (wide.astype(dtype),)


def dot_cuda(a: jax.Array, b: jax.Array, *, a_axis: int, b_axis: int, dtype: str) -> tuple[jax.Array]:
    """bf16 operands go to the tensor cores as they are, which sum in fp32; one beside them is rounded to bf16 before.

    The result is rounded to `dtype` inside of the product: as an fp32 array it would cross the memory twice more.
    """
    if jnp.bfloat16 not in (a.dtype, b.dtype):
        return dot_cpu(a, b, a_axis=a_axis, b_axis=b_axis, dtype=dtype)
    operands = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return (lax.dot_general(*operands, _numbers(a_axis, b_axis), preferred_element_type=jnp.dtype(dtype)),)


_dot = by_platform("backward_dot", cpu=dot_cpu, cuda=dot_cuda)


def dot(a: jax.Array, b: jax.Array, *, axes: tuple[int, int], dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Contracts axis `axes[0]` of the matrix a with axis `axes[1]` of the matrix b: a matrix of `dtype`."""
    return _dot(a, b, a_axis=axes[0], b_axis=axes[1], dtype=str(jnp.dtype(dtype)))[0]
