"""From a region's call to its sealed kernels on sm90, and into XLA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pallas_kernels import kernel_source
from pallas_kernels.program import Program

if TYPE_CHECKING:
    from pallas_kernels.region import Region
    from pallas_kernels.seal import SealedProgram

Type = tuple[tuple[int, ...], str]
Parameter = int | float | bool | str


def _matmul(x: Type, w: Type, bias: Type | None = None, *, leaves: int, out_dtype: str) -> Program:
    from pallas_kernels.matmul.hopper import matmul_program

    (T, K), (N, _) = x[0], w[0]
    return matmul_program(T, N, K, leaves=leaves, bias=bias is not None, out_dtype=out_dtype)


def _gated_matmul(x: Type, w: Type) -> Program:
    from pallas_kernels.gated_matmul.hopper import gated_matmul_program

    (T, K), (N, _) = x[0], w[0]
    return gated_matmul_program(T, N // 2, K)


def _rms_norm(x: Type, w: Type, *, eps: float) -> Program:
    from pallas_kernels.rms_norm.hopper import rms_norm_program

    if len(x[0]) != 2:
        raise NotImplementedError(f"rms_norm takes x [T, H] on sm90; got {x[0]}")
    return rms_norm_program(*x[0], eps=eps)


def _add_rms_norm(x: Type, residual: Type, w: Type, *, eps: float) -> Program:
    from pallas_kernels.rms_norm.hopper import add_rms_norm_program

    return add_rms_norm_program(*x[0], eps=eps)


def _residual_add(x: Type, residual: Type) -> Program:
    from pallas_kernels.residual_add.hopper import residual_add_program

    return residual_add_program(*x[0])


def _swiglu(gate_up: Type) -> Program:
    from pallas_kernels.swiglu.hopper import swiglu_program

    return swiglu_program(gate_up[0][0], gate_up[0][1] // 2)


def _qk_norm_rope(qkv: Type, cos_sin: Type, *norms: Type, key_heads: int, eps: float) -> Program:
    from pallas_kernels.qk_norm_rope.hopper import qk_norm_rope_program

    (T, columns), (_, D) = qkv[0], cos_sin[0]
    return qk_norm_rope_program(T, columns // D - 2 * key_heads, key_heads, D, norm=bool(norms), eps=eps)


def _paged_qk_norm_rope(
    qkv: Type, cos_sin: Type, slots: Type, k_cache: Type, v_cache: Type, *norms: Type, key_heads: int, eps: float
) -> Program:
    from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program

    (T, columns), (pages, page, K, D) = qkv[0], k_cache[0]
    return paged_qk_norm_rope_program(
        T, columns // D - 2 * key_heads, K, D, pages=pages, page=page, norm=bool(norms), eps=eps
    )


def _attention(q: Type, k: Type, v: Type, *others: Type, scale: float, split: int) -> Program:
    from pallas_kernels.attention.hopper import attention_program

    return attention_program(*q[0][:2], *k[0][1:], scale=scale, split=split)


def _paged_attention(
    q: Type,
    k_cache: Type,
    v_cache: Type,
    block_table: Type,
    *others: Type,
    scale: float,
    split: int,
    single_tokens_only: bool = False,
) -> Program:
    from pallas_kernels.attention.hopper import paged_attention_program

    (pages, page, K, D), (requests, request_pages) = k_cache[0], block_table[0]
    sizes = {"pages": pages, "page": page, "requests": requests, "request_pages": request_pages}
    options = {"scale": scale, "split": split, "single_tokens_only": single_tokens_only}
    return paged_attention_program(*q[0][:2], K, D, **sizes, **options)


def _log_prob_rows(x: Type, w: Type, temperature: Type, *, vocab_size: int) -> Program:
    from pallas_kernels.lm_head.hopper import log_prob_rows_program

    return log_prob_rows_program(*x[0], w[0][0], vocab_size=vocab_size)


def _token_log_probs(x: Type, w: Type, targets: Type, temperature: Type, *, vocab_size: int) -> Program:
    from pallas_kernels.lm_head.hopper import token_log_probs_program

    return token_log_probs_program(*x[0], w[0][0], vocab_size=vocab_size)


_PROGRAMS: Mapping[str, Callable[..., Program]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "residual_add": _residual_add,
    "swiglu": _swiglu,
    "qk_norm_rope": _qk_norm_rope,
    "paged_qk_norm_rope": _paged_qk_norm_rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "paged_decode_attention": partial(_paged_attention, single_tokens_only=True),
    "log_prob_rows": _log_prob_rows,
    "token_log_probs": _token_log_probs,
}


def region_program(name: str, types: tuple[Type, ...], parameters: Mapping[str, Parameter]) -> Program:
    """The kernels of one call: (shape, dtype) of every operand in the region's order, and its parameters.

    Raises NotImplementedError for a region without kernels, or where the operands' dtypes are not the kernels';
    ValueError for shapes that no kernel takes.
    """
    if name not in _PROGRAMS:
        raise NotImplementedError(f"region {name} has no kernels for sm90")
    program = _PROGRAMS[name](*types, **parameters)
    for operand, (shape, dtype) in zip(program.operands, types, strict=True):
        buffer = program.buffers[operand]
        if buffer.shape != tuple(shape) or buffer.dtype != dtype:
            raise NotImplementedError(
                f"region {name} takes {operand} as {buffer.dtype} {buffer.shape} on sm90; got {dtype} {tuple(shape)}"
            )
    return program


@cache
def _sealed(
    name: str, version: str, types: tuple[Type, ...], parameters: tuple[tuple[str, Parameter], ...]
) -> SealedProgram:
    from pallas_kernels.seal import seal_program

    constants = dict(parameters)
    return seal_program(name, version, constants, region_program(name, types, constants))


def seal_region(region: Region, types: tuple[Type, ...], parameters: Mapping[str, Parameter]) -> SealedProgram:
    """The sealed kernels of one call, lowered once a process.

    Raises what `region_program` does, and ToolchainMismatch where this JAX may not seal.
    """
    return _sealed(region.name, region.version, types, tuple(sorted(parameters.items())))


def lower_on_cuda(region: Region, context: Any, operands: tuple[Any, ...], parameters: Mapping[str, Parameter]) -> Any:
    """The region's lowering rule for CUDA: the custom calls of its sealed kernels.

    They are those of the loaded bundles; only a process that has loaded none lowers them itself. Raises KernelMissing.
    """
    from pallas_kernels.sealed_call import emit

    types = tuple((tuple(aval.shape), str(np.dtype(aval.dtype))) for aval in context.avals_in)
    program = kernel_source.LOADED.find(region, types, parameters) or seal_region(region, types, parameters)
    return emit(context, program, operands)
