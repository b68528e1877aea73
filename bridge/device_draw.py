"""The draw of `bridge.device_sampling` as two Triton kernels, which read the rows once and write nothing so large."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# N: rows; V: vocabulary; B: blocks of it; C: tokens of a block; G: blocks that one program sums.


@triton.jit
def _mass(log_probs, inside, UNITS: tl.constexpr):
    """Probabilities counted in whole units, float64; nothing outside of the vocabulary."""
    return tl.where(inside, tl.floor(tl.exp(log_probs) * UNITS), 0.0).to(tl.float64)


@triton.jit
def _sum_blocks(log_probs_NV, sums_NB, stride, V, B, C: tl.constexpr, G: tl.constexpr, UNITS: tl.constexpr):
    row, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1) * G + tl.arange(0, G)
    columns = blocks[:, None] * C + tl.arange(0, C)[None, :]
    values = tl.load(log_probs_NV + row * stride + columns, mask=columns < V, other=0.0)
    tl.store(sums_NB + row * B + blocks, tl.sum(_mass(values, columns < V, UNITS), 1), mask=blocks < B)


@triton.jit
def _choose(
    log_probs_NV,
    sums_NB,
    u_N,
    drawn_N,
    stride,
    V,
    B,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    UNITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED)
    ends = tl.cumsum(tl.load(sums_NB + row * B + blocks, mask=blocks < B, other=0.0), 0)
    total = tl.max(ends, 0)
    # A whole number below the total, so that it falls into a token that has mass.
    wanted = tl.minimum(tl.floor(total * tl.load(u_N + row)), total - 1)
    block = tl.minimum(tl.sum((ends <= wanted).to(tl.int32), 0), B - 1)
    before = tl.max(tl.where(ends <= wanted, ends, 0.0), 0)
    columns = block * C + tl.arange(0, C)
    values = tl.load(log_probs_NV + row * stride + columns, mask=columns < V, other=0.0)
    inside = tl.cumsum(_mass(values, columns < V, UNITS), 0)
    place = tl.sum((inside <= wanted - before).to(tl.int32), 0)
    tl.store(drawn_N + row, tl.minimum(block * C + place, V - 1).to(tl.int64))


def draw_on_card(log_probs_NV: torch.Tensor, u_N: torch.Tensor, *, block: int, units: float) -> torch.Tensor:
    """The token that each `u` in [0, 1) selects, int64 [N]. log_probs: float32, rows contiguous; u: float64.

    block: tokens whose mass is summed first, a power of two. units: into how many parts probability 1 is counted.
    """
    N, V = log_probs_NV.shape
    B = triton.cdiv(V, block)
    sums_NB = torch.empty((N, B), dtype=torch.float64, device=log_probs_NV.device)
    drawn_N = torch.empty((N,), dtype=torch.int64, device=log_probs_NV.device)
    stride, together = log_probs_NV.stride(0), 8
    _sum_blocks[(N, triton.cdiv(B, together))](log_probs_NV, sums_NB, stride, V, B, block, together, units)
    padded = triton.next_power_of_2(B)
    _choose[(N,)](log_probs_NV, sums_NB, u_N, drawn_N, stride, V, B, block, padded, units)
    return drawn_N
