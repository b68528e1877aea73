"""The cast region: rounding between float dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cast import cpu, cuda, vjp
from pallas_kernels.cast.spec import SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable

DTYPES = ("bfloat16", "float32")


def _shape_rule(x: ShapeAndDtype, *, dtype: str) -> tuple[ShapeAndDtype, ...]:
    if dtype not in DTYPES or str(x[1]) not in DTYPES:
        raise ValueError(f"cast goes between {DTYPES}; got {x[1]} to {dtype}")
    return ((x[0], np.dtype(jnp.dtype(dtype))),)


REGION = Region(
    name="cast",
    operands=("x",),
    parameters={"dtype": str},
    results=("y",),
    shape_rule=_shape_rule,
    cpu=cpu.cast,
    spec=SPEC,
    cuda=cuda.cast,
)
_call = differentiable(REGION, vjp.backward, vjp.keep)


def cast(x: jax.Array, *, dtype: Any) -> jax.Array:
    """x in another float dtype (bfloat16, float32), rounded to nearest even. Raises ValueError for other dtypes."""
    return _call(x, dtype=jnp.dtype(dtype).name)
