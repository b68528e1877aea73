"""The SwiGLU region: silu of the gate times up."""

import jax

from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.swiglu import cpu, vjp
from pallas_kernels.swiglu.spec import SPEC


def _shape_rule(gate_up: ShapeAndDtype) -> tuple[ShapeAndDtype, ...]:
    shape, dtype = gate_up
    if len(shape) != 2 or shape[1] % 2:
        raise ValueError(f"swiglu needs gate and up side by side, [T, 2 I]; got {shape}")
    return (((shape[0], shape[1] // 2), dtype),)


REGION = Region(
    name="swiglu",
    operands=("gate_up",),
    parameters={},
    results=("y",),
    shape_rule=_shape_rule,
    cpu=cpu.swiglu,
    spec=SPEC,
)
_call = differentiable(REGION, vjp.backward)


def swiglu(gate_up_T2I: jax.Array) -> jax.Array:
    """silu(gate) * up, [T, 2 I] to [T, I], gate first. Source: Shazeer 2020; rounding of the Hugging Face LlamaMLP."""
    return _call(gate_up_T2I)
