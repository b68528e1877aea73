"""What the gated matmul region computes, how it rounds and what can go wrong."""

from pallas_kernels.matmul.spec import SPEC as MATMUL
from pallas_kernels.region import Spec
from pallas_kernels.swiglu.spec import SPEC as SWIGLU

SPEC = Spec(
    version="1",
    operations=("gate_up = matmul(x, w) with one leaf and no bias", "y = swiglu(gate_up)"),
    rounding=(
        f"as matmul, version {MATMUL.version}: gate and up are each rounded once, to x's dtype",
        f"then as swiglu, version {SWIGLU.version}",
    ),
    constants={**MATMUL.constants, **SWIGLU.constants},
    hazards=("gate and up that enter SwiGLU in fp32, without the round between", *SWIGLU.hazards, *MATMUL.hazards),
)
