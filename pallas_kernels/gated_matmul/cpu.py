"""The gated matmul for XLA:CPU: the forms of its two parts, one after the other."""

import jax

from pallas_kernels.matmul import cpu as matmul
from pallas_kernels.swiglu import cpu as swiglu


def gated_matmul(x_TK: jax.Array, w_NK: jax.Array) -> tuple[jax.Array]:
    """The region's CPU form."""
    (gate_up_TN,) = matmul.matmul(x_TK, w_NK, leaves=1, out_dtype=x_TK.dtype.name)
    return swiglu.swiglu(gate_up_TN)
