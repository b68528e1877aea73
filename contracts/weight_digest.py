"""The weight digest: 64 bits that JAX, torch and numpy compute alike, in any order and over any sharding.

Each element of each tensor is mixed with its position and its tensor's id by 32-bit integer arithmetic; the digest is
two lanes of wrapping uint32 sums. A sum does not depend on order, so shards and layers add up, yet a permuted, moved,
missing or changed element changes both lanes. It finds accidents (a stale, partial or permuted sync), not forgeries.

The mix of lane l, all in wrapping uint32:

    x = word * WORD[l] + position * POSITION[l] + tensor_id * TENSOR[l] + START[l]
    x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16

The finaliser is Chris Wellons's lowbias32 (github.com/skeeto/hash-prospector). WORD is odd and the finaliser is a
bijection, so a change in a single word always changes both lanes. torch does the same in int64 with `& 0xffffffff`
after each multiplication and sum. `weight_digest_vectors.json` holds test vectors.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from contracts.errors import BadCheckpoint

MASK = 0xFFFFFFFF
LANES = 2
WORD = (0x9E3779B1, 0x85EBCA77)
POSITION = (0xC2B2AE3D, 0x27D4EB2F)
TENSOR = (0x165667B1, 0x9E3779B9)
START = (0x243F6A88, 0xB7E15162)
FINALISER = ((16, 0x7FEB352D), (15, 0x846CA68B))
LAST_SHIFT = 16
LARGEST_TENSOR = 2**32
# Elements at a time: the temporaries of one block stay in cache.
BLOCK = 1 << 16


def tensor_id_of(name: str) -> int:
    """A tensor's 32-bit id: the first four bytes, big-endian, of the SHA-256 of its name in UTF-8."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big")


def mix32(word: np.ndarray, position: np.ndarray, tensor_id: int, lane: int = 0) -> np.ndarray:
    """Mix words uint32[N] at positions uint32[N] of one tensor for one lane; returns uint32[N]."""
    key = np.uint32((tensor_id * TENSOR[lane] + START[lane]) & MASK)
    mixed: np.ndarray = word * np.uint32(WORD[lane]) + position * np.uint32(POSITION[lane]) + key
    for shift, factor in FINALISER:
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return mixed ^ (mixed >> np.uint32(LAST_SHIFT))


def words_of(tensor: np.ndarray) -> np.ndarray:
    """The elements' bits in row-major order as uint32[N], one word an element: bfloat16 and float16 are zero-extended.

    Raises `BadCheckpoint` for elements that are not 1, 2 or 4 bytes wide.
    """
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}.get(tensor.dtype.itemsize)
    if unsigned is None:
        raise BadCheckpoint(
            field="dtype",
            found=tensor.dtype,
            allowed="elements of 1, 2 or 4 bytes",
            reason="The weight digest has one 32-bit word an element.",
        )
    return np.ascontiguousarray(tensor).reshape(-1).view(unsigned).astype(np.uint32)


def tensor_lanes(words_u32: np.ndarray, tensor_id: int, first_position: int = 0) -> tuple[int, int]:
    """Both lanes of a tensor's words uint32[N], or of a contiguous piece that starts at `first_position`.

    Raises `BadCheckpoint` beyond 2**32 elements.
    """
    if first_position + words_u32.size > LARGEST_TENSOR:
        raise BadCheckpoint(
            field="size",
            found=f"{first_position + words_u32.size} elements",
            allowed=f"at most {LARGEST_TENSOR}",
            reason="The weight digest's positions have 32 bits.",
        )
    lanes = [0] * LANES
    for start in range(0, words_u32.size, BLOCK):
        word = words_u32[start : start + BLOCK].astype(np.uint32, copy=False)
        position = np.arange(first_position + start, first_position + start + word.size, dtype=np.uint64)
        for lane in range(LANES):
            mixed = mix32(word, position.astype(np.uint32), tensor_id, lane)
            lanes[lane] = (lanes[lane] + int(mixed.sum(dtype=np.uint64))) & MASK
    return lanes[0], lanes[1]


def combine(lanes: Iterable[tuple[int, int]]) -> str:
    """The digest of all tensors, or of all shards: wrapping sums, as 16 hexadecimal digits, lane 0 first."""
    total = [0] * LANES
    for pair in lanes:
        total = [(so_far + lane) & MASK for so_far, lane in zip(total, pair, strict=True)]
    return "".join(f"{lane:08x}" for lane in total)


def weight_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """The digest of named tensors: 16 hexadecimal digits. The order of the mapping does not matter."""
    return combine(tensor_lanes(words_of(tensor), tensor_id_of(name)) for name, tensor in tensors.items())
