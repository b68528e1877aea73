"""The weight digest of `contracts.weight_digest` on a card, as one Triton kernel that reads every weight once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from contracts.weight_digest import FINALISER, LANES, LAST_SHIFT, MASK, POSITION, START, TENSOR, WORD

#: Words that one program mixes: what torch adds up afterwards stays small.
BLOCK = 8192
_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


# Triton reads globals that are declared to be constant, and no others.
_WORD_0, _WORD_1 = (tl.constexpr(value) for value in WORD)
_POSITION_0, _POSITION_1 = (tl.constexpr(value) for value in POSITION)
(_SHIFT_0, _FACTOR_0), (_SHIFT_1, _FACTOR_1) = (tuple(map(tl.constexpr, pair)) for pair in FINALISER)
_SHIFT_2 = tl.constexpr(LAST_SHIFT)


@triton.jit
def _mixed(word, position, key, WORD: tl.constexpr, POSITION: tl.constexpr):
    """All in wrapping uint32."""
    mixed = word * tl.full((), WORD, tl.uint32) + position * tl.full((), POSITION, tl.uint32) + key.to(tl.uint32)
    mixed = (mixed ^ (mixed >> _SHIFT_0)) * tl.full((), _FACTOR_0, tl.uint32)
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * tl.full((), _FACTOR_1, tl.uint32)
    return mixed ^ (mixed >> _SHIFT_2)


@triton.jit(do_not_specialize=["count", "first", "key_0", "key_1"])
def _sum_lanes(words_N, sums_BL, count, first, key_0, key_1, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    word = tl.load(words_N + index, mask=inside, other=0).to(tl.uint32)
    position = (first + index).to(tl.uint32)
    lane_0 = _mixed(word, position, key_0, _WORD_0, _POSITION_0).to(tl.int32)
    lane_1 = _mixed(word, position, key_1, _WORD_1, _POSITION_1).to(tl.int32)
    tl.store(sums_BL + 2 * block, tl.sum(tl.where(inside, lane_0, 0), 0))
    tl.store(sums_BL + 2 * block + 1, tl.sum(tl.where(inside, lane_1, 0), 0))


def lanes_on_card(bits_N: torch.Tensor, tensor_id: int, first_position: int) -> tuple[int, int]:
    """Both lanes of a tensor's elements, int8, int16 or int32 [N] in contiguous memory, from `first_position` on.

    Every program's sums wrap, and so does their sum, so the order in which they are added does not matter.
    """
    count = bits_N.numel()
    sums_BL = torch.zeros((triton.cdiv(count, BLOCK), LANES), dtype=torch.int32, device=bits_N.device)
    keys = [_signed(tensor_id * TENSOR[lane] + START[lane]) for lane in range(LANES)]
    words_N = bits_N.view(_DTYPES[bits_N.element_size()])
    if count:
        _sum_lanes[(len(sums_BL),)](words_N, sums_BL, count, first_position, *keys, BLOCK)
    first_lane, second_lane = sums_BL.sum(0, dtype=torch.int64).tolist()
    return first_lane & MASK, second_lane & MASK


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of a value, as Triton takes it."""
    return (value & MASK) - (1 << 32 if value & 1 << 31 else 0)
