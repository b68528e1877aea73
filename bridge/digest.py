"""The weight digest of `contracts.weight_digest`, computed by torch on whatever device the weights are."""

from collections.abc import Mapping

import torch

from contracts.errors import BadCheckpoint
from contracts.weight_digest import (
    FINALISER,
    LANES,
    LARGEST_TENSOR,
    LAST_SHIFT,
    MASK,
    POSITION,
    START,
    TENSOR,
    WORD,
    combine,
    tensor_id_of,
)

# Elements at a time: the temporaries stay in cache, and torch hands a block of at most 32,768 elements to no second
# thread: a barrier for every operation took 16 times as long.
BLOCK = 1 << 15

# torch lacks uint32 arithmetic, but int32 products and sums wrap to the same 32 bits; only a right shift differs, whose
# copies of the sign are masked off. It is three times as fast as int64 with a mask after every operation.


def tensor_lanes(tensor: torch.Tensor, tensor_id: int, first_position: int = 0) -> tuple[int, int]:
    """Both lanes of a tensor in row-major order, or of a contiguous piece of one that starts at `first_position`.

    Raises BadCheckpoint for elements that are not 1, 2 or 4 bytes wide, and beyond 2**32 elements.
    """
    if first_position + tensor.numel() > LARGEST_TENSOR:
        raise BadCheckpoint(
            field="size",
            found=f"{first_position + tensor.numel()} elements",
            allowed=f"at most {LARGEST_TENSOR}",
            reason="The weight digest's positions have 32 bits.",
        )
    bits = _bits(tensor)
    if bits.is_cuda:
        # Imported here: Triton needs a card.
        from bridge.device_digest import lanes_on_card

        return lanes_on_card(bits, tensor_id, first_position)
    lanes = [torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(LANES)]
    for start in range(0, bits.numel(), BLOCK):
        word = _words(bits[start : start + BLOCK])
        begin = first_position + start
        position = torch.arange(begin, begin + word.numel(), device=tensor.device).to(torch.int32)
        for lane in range(LANES):
            lanes[lane] += _mix32(word, position, tensor_id, lane).sum(dtype=torch.int64)
    first, second = (int(lane) & MASK for lane in lanes)
    return first, second


def weight_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of named tensors, 16 hexadecimal digits: equal to that of the same weights on the trainer's side."""
    return combine(tensor_lanes(tensor, tensor_id_of(name)) for name, tensor in tensors.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if tensor.element_size() not in widths:
        raise BadCheckpoint(
            field="dtype",
            found=tensor.dtype,
            allowed="elements of 1, 2 or 4 bytes",
            reason="The weight digest has one 32-bit word an element.",
        )
    return tensor.detach().contiguous().view(widths[tensor.element_size()]).reshape(-1)


def _words(bits: torch.Tensor) -> torch.Tensor:
    """One int32 an element, zero-extended."""
    return bits.to(torch.int32) & 0xFFFF if bits.dtype is torch.int16 else bits.to(torch.int32)


def _mix32(word: torch.Tensor, position: torch.Tensor, tensor_id: int, lane: int) -> torch.Tensor:
    mixed = word * _signed(WORD[lane])
    mixed += position * _signed(POSITION[lane])
    mixed += _signed(tensor_id * TENSOR[lane] + START[lane])
    for shift, factor in FINALISER:
        mixed ^= _shifted(mixed, shift)
        mixed *= _signed(factor)
    mixed ^= _shifted(mixed, LAST_SHIFT)
    return mixed


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    return (x >> shift).bitwise_and_(MASK >> shift)


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of a value."""
    return (value & MASK) - (1 << 32 if value & 1 << 31 else 0)
