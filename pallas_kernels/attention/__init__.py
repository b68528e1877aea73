"""The attention regions: packed (varlen) for the trainer, paged for the engine, one schedule."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention import cpu, vjp
from pallas_kernels.attention.spec import BLOCK, DECODE_SPEC, DEFAULT_SPLIT, PAGED_SPEC, SPEC
from pallas_kernels.region import Region, ShapeAndDtype, differentiable
from pallas_kernels.rounding import check_floats


def _check_heads(name: str, q: ShapeAndDtype, key_heads: int, head: int, split: int) -> None:
    if len(q[0]) != 3 or q[0][2] != head or q[0][1] % key_heads:
        raise ValueError(f"{name}: q {q[0]} does not fit {key_heads} key heads of size {head}")
    if split < 1 or split % min(BLOCK, split):
        raise ValueError(f"{name}: split = {split} must be below {BLOCK} or a multiple of it")


def _check_tokens(name: str, tokens: object, **operands: ShapeAndDtype) -> None:
    for label, (shape, dtype) in operands.items():
        if shape != (tokens,) or str(dtype) != "int32":
            raise ValueError(f"{name}: {label} must be int32 [T]; got {dtype} {shape} for T = {tokens}")


def _shape_rule(
    q: ShapeAndDtype,
    k: ShapeAndDtype,
    v: ShapeAndDtype,
    positions: ShapeAndDtype,
    segment_ids: ShapeAndDtype,
    layer: ShapeAndDtype,
    *,
    scale: float,
    split: int,
) -> tuple[ShapeAndDtype, ...]:
    if len(k[0]) != 3 or k != v or k[0][0] != q[0][0] or k[1] != q[1]:
        raise ValueError(f"attention needs q [T, H, D] and k, v [T, K, D] of one dtype; got {q}, {k} and {v}")
    check_floats("attention", q=q[1])
    _check_heads("attention", q, k[0][1], k[0][2], split)
    _check_tokens("attention", q[0][0], positions=positions, segment_ids=segment_ids)
    if layer[0] != ():
        raise ValueError(f"attention needs a scalar layer; got {layer[0]}")
    return (q,)


def _paged_shape_rule(
    name: str,
    q: ShapeAndDtype,
    k_cache: ShapeAndDtype,
    v_cache: ShapeAndDtype,
    block_table: ShapeAndDtype,
    request_of_token: ShapeAndDtype,
    positions: ShapeAndDtype,
    *,
    scale: float,
    split: int,
) -> tuple[ShapeAndDtype, ...]:
    if len(k_cache[0]) != 4 or k_cache != v_cache or str(k_cache[1]) not in _cache_dtypes(str(q[1])):
        raise ValueError(
            f"{name} needs two caches [pages, page, K, D] of q's dtype, or of int16 for bfloat16; "
            f"got q {q}, {k_cache} and {v_cache}"
        )
    _check_heads(name, q, k_cache[0][2], k_cache[0][3], split)
    _check_tokens(name, q[0][0], request_of_token=request_of_token, positions=positions)
    if len(block_table[0]) != 2 or str(block_table[1]) != "int32":
        raise ValueError(f"{name} needs an int32 block table [R, P]; got {block_table}")
    return (q,)


def _cache_dtypes(dtype: str) -> tuple[str, ...]:
    return ("bfloat16", "int16") if dtype == "bfloat16" else (dtype,)


REGION = Region(
    name="attention",
    operands=("q", "k", "v", "positions", "segment_ids", "layer"),
    parameters={"scale": float, "split": int},
    results=("out",),
    shape_rule=_shape_rule,
    cpu=cpu.attention,
    spec=SPEC,
)
PAGED_REGION = Region(
    name="paged_attention",
    operands=("q", "k_cache", "v_cache", "block_table", "request_of_token", "positions"),
    parameters={"scale": float, "split": int},
    results=("out",),
    shape_rule=partial(_paged_shape_rule, "paged_attention"),
    cpu=cpu.paged_attention,
    spec=PAGED_SPEC,
)
DECODE_REGION = dataclasses.replace(
    PAGED_REGION,
    name="paged_decode_attention",
    shape_rule=partial(_paged_shape_rule, "paged_decode_attention"),
    spec=DECODE_SPEC,
)
_call = differentiable(REGION, vjp.backward, vjp.keep)


def attention(
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    positions_T: jax.Array,
    segment_ids_T: jax.Array,
    layer: jax.Array | int,
    *,
    scale: float,
    split: int = DEFAULT_SPLIT,
) -> jax.Array:
    """Causal attention inside packed segments, [T, H, D]; H is a multiple of K (grouped queries).

    Segments are contiguous and start at position 0, so a token's segment starts `position` tokens before it. A padding
    row has position 0 and segment -1: its result is zero. `layer` names the layer for the engine and moves no bit.
    Source: online softmax of Milakov and Gimelshein 2018, split as in FlashDecoding. Raises ValueError for shapes.
    """
    return _call(q_THD, k_TKD, v_TKD, positions_T, segment_ids_T, jnp.int32(layer), scale=float(scale), split=split)


def paged_attention(
    q_THD: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table_RP: jax.Array,
    request_of_token_T: jax.Array,
    positions_T: jax.Array,
    *,
    scale: float,
    split: int = DEFAULT_SPLIT,
) -> jax.Array:
    """The same attention over pages: bit for bit what `attention` gives for the same tokens.

    Caches [num_pages, page, K, D] hold the batch's own keys already, in q's dtype or as int16 views of bfloat16. A
    request of -1 marks a dead row, whose result is zero. Not differentiable. Raises ValueError for shapes.
    """
    operands = (q_THD, k_cache, v_cache, block_table_RP, request_of_token_T, positions_T)
    return PAGED_REGION.bind(*operands, scale=float(scale), split=split)


def paged_decode_attention(
    q_THD: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table_RP: jax.Array,
    request_of_token_T: jax.Array,
    positions_T: jax.Array,
    *,
    scale: float,
    split: int = DEFAULT_SPLIT,
) -> jax.Array:
    """`paged_attention` where every request has at most one token in the batch, as in a decode step: the same bits.

    On a card rows of a request with several tokens are NaN, and `request_of_token_T` and `positions_T` must not be
    results of the launch right before, which they are read beside; XLA gives no such promise, the engine's graph does.
    Not differentiable. Raises ValueError for shapes.
    """
    operands = (q_THD, k_cache, v_cache, block_table_RP, request_of_token_T, positions_T)
    return DECODE_REGION.bind(*operands, scale=float(scale), split=split)
