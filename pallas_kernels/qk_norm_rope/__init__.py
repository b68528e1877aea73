"""The region of QK-norm and rotary position embedding on queries and keys."""

import jax

from pallas_kernels.qk_norm_rope import cpu, vjp
from pallas_kernels.qk_norm_rope.spec import SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable


def _shape_rule(*operands: ShapeAndDtype, eps: float) -> tuple[ShapeAndDtype, ...]:
    q, k, (table_shape, table_dtype), *norms = operands
    tokens, _, head = q[0]
    if len(k[0]) != 3 or k[0][0] != tokens or k[0][2] != head or head % 2:
        raise ValueError(f"qk_norm_rope needs q [T, H, D] and k [T, K, D], D even; got {q[0]} and {k[0]}")
    if table_shape != (tokens, head) or str(table_dtype) != "float32":
        raise ValueError(f"qk_norm_rope needs an fp32 table [T, D]; got {table_shape} {table_dtype}")
    if len(norms) == 1 or any(shape != (head,) for shape, _ in norms):
        raise ValueError(f"qk_norm_rope needs no norm weight or two of shape ({head},); got {[n[0] for n in norms]}")
    return (q, k)


REGION = Region(
    name="qk_norm_rope",
    operands=("q", "k", "cos_sin", "q_norm?", "k_norm?"),
    parameters={"eps": float},
    results=("q", "k"),
    shape_rule=_shape_rule,
    cpu=cpu.qk_norm_rope,
    spec=SPEC,
)
_call = differentiable(REGION, vjp.backward)


def qk_norm_rope(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    cos_sin_TD: jax.Array,
    q_norm_D: jax.Array | None = None,
    k_norm_D: jax.Array | None = None,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Optional RMSNorm of every head, then the rotation by each token's angles; returns (q, k).

    `cos_sin` is the fp32 table at each token's position: cosines in [:, :D/2], sines in [:, D/2:]. Source: Su et al.
    2021 in the rotate_half convention of Hugging Face. Raises ValueError for shapes that do not fit.
    """
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError("qk_norm_rope needs both norm weights or none")
    norms = () if q_norm_D is None else (q_norm_D, k_norm_D)
    return _call(q_THD, k_TKD, cos_sin_TD, *norms, eps=float(eps))
