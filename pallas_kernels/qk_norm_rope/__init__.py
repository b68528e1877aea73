"""The region that cuts a projection into queries, keys and values and gives the first two QK-norm and rotation."""

import jax

from pallas_kernels.qk_norm_rope import cpu, vjp
from pallas_kernels.qk_norm_rope.spec import PAGED_SPEC, SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rounding import check_floats


def _shape_rule(*operands: ShapeAndDtype, key_heads: int, eps: float) -> tuple[ShapeAndDtype, ...]:
    (qkv, dtype), (table, table_dtype), *norms = operands
    check_floats("qk_norm_rope", qkv=dtype, **{f"norm {i}": norm[1] for i, norm in enumerate(norms)})
    if len(table) != 2 or table[0] != qkv[0] or table[1] % 2 or str(table_dtype) != "float32":
        raise ValueError(f"qk_norm_rope needs an fp32 table [T, D], D even; got {table_dtype} {table} for qkv {qkv}")
    tokens, head = table
    if len(qkv) != 2 or qkv[1] % head or key_heads < 1 or qkv[1] // head <= 2 * key_heads:
        raise ValueError(
            f"qk_norm_rope needs qkv [T, (H + 2 * {key_heads}) * {head}] with {key_heads} key heads; got {qkv}"
        )
    if len(norms) == 1 or any(shape != (head,) for shape, _ in norms):
        raise ValueError(f"qk_norm_rope needs no norm weight or two of shape ({head},); got {[n[0] for n in norms]}")
    keys = (tokens, key_heads, head)
    return ((tokens, qkv[1] // head - 2 * key_heads, head), dtype), (keys, dtype), (keys, dtype)


def _paged_shape_rule(
    qkv: ShapeAndDtype,
    cos_sin: ShapeAndDtype,
    slots: ShapeAndDtype,
    k_cache: ShapeAndDtype,
    v_cache: ShapeAndDtype,
    *norms: ShapeAndDtype,
    key_heads: int,
    eps: float,
) -> tuple[ShapeAndDtype, ...]:
    q, (keys, dtype), _ = _shape_rule(qkv, cos_sin, *norms, key_heads=key_heads, eps=eps)
    if len(k_cache[0]) != 4 or k_cache != v_cache or k_cache[0][2:] != keys[1:] or k_cache[1] != dtype:
        raise ValueError(
            f"paged_qk_norm_rope needs two caches {dtype} [pages, page, {keys[1]}, {keys[2]}]; got {k_cache}, {v_cache}"
        )
    if slots[0] != keys[:1] or str(slots[1]) != "int32":
        raise ValueError(f"paged_qk_norm_rope needs int32 slots [T]; got {slots} for T = {keys[0]}")
    return q, k_cache, v_cache


REGION = Region(
    name="qk_norm_rope",
    operands=("qkv", "cos_sin", "q_norm?", "k_norm?"),
    parameters={"key_heads": int, "eps": float},
    results=("q", "k", "v"),
    shape_rule=_shape_rule,
    cpu=cpu.qk_norm_rope,
    spec=SPEC,
)
PAGED_REGION = Region(
    name="paged_qk_norm_rope",
    operands=("qkv", "cos_sin", "slots", "k_cache", "v_cache", "q_norm?", "k_norm?"),
    parameters={"key_heads": int, "eps": float},
    results=("q", "k_cache", "v_cache"),
    shape_rule=_paged_shape_rule,
    cpu=cpu.paged_qk_norm_rope,
    spec=PAGED_SPEC,
    updates=("k_cache", "v_cache"),
)
_call = differentiable(REGION, vjp.backward)


def qk_norm_rope(
    qkv_TC: jax.Array,
    cos_sin_TD: jax.Array,
    q_norm_D: jax.Array | None = None,
    k_norm_D: jax.Array | None = None,
    *,
    key_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [T, H, D], keys and values [T, K, D] of a projection [T, (H + 2K) * D], heads in this order.

    Every query and key head gets an RMSNorm where weights are given, then the rotation by its token's angles; values
    are moved as they are. `key_heads` is K. `cos_sin` is the fp32 table at each token's position: cosines in
    [:, :D/2], sines in [:, D/2:]. Source: Su et al. 2021 in the rotate_half convention of Hugging Face. Raises
    ValueError for shapes that do not fit.
    """
    return _call(qkv_TC, cos_sin_TD, *_both(q_norm_D, k_norm_D), key_heads=key_heads, eps=float(eps))


def paged_qk_norm_rope(
    qkv_TC: jax.Array,
    cos_sin_TD: jax.Array,
    slots_T: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    q_norm_D: jax.Array | None = None,
    k_norm_D: jax.Array | None = None,
    *,
    key_heads: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same values, keys and values put into rows of two caches; returns queries [T, H, D] and the caches.

    Caches are [pages, page, K, D] in qkv's dtype. `slots` are int32 rows of them, counted over all pages; a token with
    one below 0 leaves no trace. Kernels write the caches in place. Not differentiable. Raises ValueError for shapes.
    """
    operands = (qkv_TC, cos_sin_TD, slots_T, k_cache, v_cache, *_both(q_norm_D, k_norm_D))
    return PAGED_REGION.bind(*operands, key_heads=key_heads, eps=float(eps))


def _both(q_norm_D: jax.Array | None, k_norm_D: jax.Array | None) -> tuple[jax.Array, ...]:
    if q_norm_D is None and k_norm_D is None:
        return ()
    if q_norm_D is None or k_norm_D is None:
        raise ValueError("qk_norm_rope needs both norm weights or none")
    return q_norm_D, k_norm_D
