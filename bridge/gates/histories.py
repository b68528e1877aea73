"""Attention over the same histories in two forms: packed in a batch, and in shuffled pages with stale NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bridge.gates.card import DECODE
from bridge.gates.operands import hazardous_rows
from pallas_kernels.kernel_shapes import TOKEN_STEP
from pallas_kernels.seal import SealedProgram

# T: tokens of a bucket, L: tokens of a sequence, H: query heads, K: key heads, D: head size.

BLOCKS, TILES = (64, 128), (64, 128)
"""Positions of a block of keys and tokens of a tile of queries, of every form of the kernels."""


PAGED = ("paged_attention", DECODE)
"""The engine's forms: for any step, and for one in which every request has one token."""
ATTENTION = ("attention", *PAGED)
"""All forms."""


class Chunk(NamedTuple):
    """Queries of one request: tokens start to stop of a sequence whose keys up to stop are cached."""

    sequence: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many queries."""
        return self.stop - self.start


@dataclass(frozen=True)
class Histories:
    """Queries [L, H, D], keys and values [L, K, D] of every sequence."""

    q: tuple[torch.Tensor, ...]
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [len(q) for q in self.q]


def make_histories(
    sizes: tuple[int, int, int], lengths: Sequence[int], device: torch.device, *, hazards: bool = True
) -> Histories:
    """Random histories for (H, K, D); with hazards every second one has rows of every kind, and equal keys.

    The longest has none: one huge score would leave nothing of the other keys, and with them of most faults.
    """
    H, K, D = sizes
    total = sum(lengths)
    odd = [bool((len(lengths) - 1 - number) % 2) for number in range(len(lengths))]
    spoiled = torch.tensor(odd).repeat_interleave(torch.tensor(lengths)).to(device)[:, None, None]
    made = []
    for seed, heads in enumerate((H, K, K)):
        generator = torch.Generator(device).manual_seed(seed)
        rows = torch.randn(total, heads, D, generator=generator, device=device).bfloat16()
        if hazards:
            cycle = hazardous_rows((max(total, 64), heads, D), generator)[:total]
            # A product of two huge rows must stay finite: only values have them.
            kinds = cycle if seed == 2 else torch.where(cycle.abs() < 2.0**20, cycle, rows)
            if seed == 1:
                kinds[1::5] = kinds[:-1:5][: len(kinds[1::5])]
            rows = torch.where(spoiled, kinds, rows)
        made.append(torch.split(rows, list(lengths)))
    return Histories(*made)


def lengths_around(boundaries: Sequence[int], longest: int) -> list[int]:
    """One less, exactly and one more of every boundary, and the longest, none above it."""
    around = {length for boundary in (1, TOKEN_STEP, *boundaries) for length in (boundary - 1, boundary, boundary + 1)}
    return sorted(length for length in {*around, longest} if 0 < length <= longest)


def sizes_of(program: SealedProgram) -> tuple[int, int, int]:
    """Query heads, key heads and head size of an attention program."""
    _, H, D = program.buffers["q"].shape
    keys = "k_cache" if "k_cache" in program.operands else "k"
    return H, program.buffers[keys].shape[-2], D


def packed_batches(lengths: Sequence[int], order: Sequence[int], T: int) -> Iterator[list[tuple[int, int]]]:
    """(sequence, first row) of one batch after the other, in this order, each with padding at its end."""
    batch: list[tuple[int, int]] = []
    used = 0
    for sequence in order:
        size = -(-lengths[sequence] // TOKEN_STEP) * TOKEN_STEP
        if batch and used + size > T - TOKEN_STEP:
            yield batch
            batch, used = [], 0
        batch.append((sequence, used))
        used += size
    if batch:
        yield batch


def packed_operands(
    program: SealedProgram, histories: Histories, batch: Sequence[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Operands of the packed form. What padding holds must not matter: it is NaN."""
    device = histories.q[0].device
    found = {name: _nan(program.buffers[name].shape, device) for name in ("q", "k", "v")}
    T = len(found["q"])
    positions = torch.zeros(T, dtype=torch.int32, device=device)
    segments = torch.full((T,), -1, dtype=torch.int32, device=device)
    for number, (sequence, at) in enumerate(batch):
        length = len(histories.q[sequence])
        rows = slice(at, at + length)
        for name in ("q", "k", "v"):
            found[name][rows] = getattr(histories, name)[sequence]
        positions[rows] = torch.arange(length, dtype=torch.int32, device=device)
        segments[rows] = number
    layer = torch.zeros((), dtype=torch.int32, device=device)
    return found | {"positions": positions, "segment_ids": segments, "layer": layer}


class Pages:
    """All histories in the pages of one cache, in shuffled order; every other position of it is NaN."""

    def __init__(self, program: SealedProgram, histories: Histories) -> None:
        _, page, K, D = program.buffers["k_cache"].shape
        device = histories.q[0].device
        self.page, self.histories = page, histories
        need = [-(-length // page) for length in histories.lengths]
        order = torch.randperm(sum(need) + 1, generator=torch.Generator().manual_seed(1)).tolist()
        #: A page that no request owns.
        self.stale = order.pop()
        self.k_cache, self.v_cache = (_nan((sum(need) + 1, page, K, D), device) for _ in range(2))
        self.pages: list[list[int]] = []
        for count in need:
            self.pages.append([order.pop() for _ in range(count)])
        for sequence, length in enumerate(histories.lengths):
            slots = self.slots(sequence, 0, length)
            self.k_cache.view(-1, K, D)[slots] = histories.k[sequence]
            self.v_cache.view(-1, K, D)[slots] = histories.v[sequence]

    def slots(self, sequence: int, start: int, stop: int) -> torch.Tensor:
        """Rows of the flat cache that hold these tokens."""
        position = torch.arange(start, stop, device=self.k_cache.device)
        pages = torch.tensor(self.pages[sequence], device=self.k_cache.device)
        return pages[position // self.page] * self.page + position % self.page

    def operands(self, program: SealedProgram, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """Operands of the paged form for requests of these chunks, one after the other, then padding."""
        device, histories = self.k_cache.device, self.histories
        q = _nan(program.buffers["q"].shape, device)
        T = len(q)
        table = torch.full(program.buffers["block_table"].shape, self.stale, dtype=torch.int32, device=device)
        owner = torch.full((T,), -1, dtype=torch.int32, device=device)
        position = torch.zeros(T, dtype=torch.int32, device=device)
        at = 0
        for request, chunk in enumerate(chunks):
            sequence, start, stop = chunk
            rows, tokens = slice(at, at + chunk.tokens), slice(start, stop)
            used = self.pages[sequence][: -(-stop // self.page)]
            table[request, : len(used)] = torch.tensor(used, dtype=torch.int32, device=device)
            owner[rows] = request
            position[rows] = torch.arange(start, stop, dtype=torch.int32, device=device)
            q[rows] = histories.q[sequence][tokens]
            at += chunk.tokens
        found = {"q": q, "k_cache": self.k_cache, "v_cache": self.v_cache, "block_table": table}
        return found | {"request_of_token": owner, "positions": position}


def steps_of(program: SealedProgram, lengths: Sequence[int]) -> Iterator[list[Chunk]]:
    """Steps that a paged form takes: `paged_steps`, or `decode_steps` where requests have one token each."""
    steps = decode_steps if program.region == DECODE else paged_steps
    return steps(lengths, program.buffers["q"].shape[0], program.buffers["block_table"].shape[0])


def decode_steps(lengths: Sequence[int], T: int, requests: int) -> Iterator[list[Chunk]]:
    """Steps of single tokens: last ones in both orders, so at other places beside other requests, and earlier ones."""
    last = [Chunk(sequence, length - 1, length) for sequence, length in enumerate(lengths)]
    earlier = [Chunk(sequence, length // 3, length // 3 + 1) for sequence, length in enumerate(lengths)]
    for chunks in (last, last[::-1], earlier):
        yield from _steps(chunks, T, requests)


def paged_steps(lengths: Sequence[int], T: int, requests: int) -> Iterator[list[Chunk]]:
    """Steps of at most T tokens: last tokens alone, the ends and the starts of sequences in chunks, and both mixed."""
    last, ends, odd = [], [], []
    for sequence, length in enumerate(lengths):
        last.append(Chunk(sequence, length - 1, length))
        ends.append(Chunk(sequence, max(0, length - T + 3), length))
        odd.append(Chunk(sequence, length // 3, min(length, length // 3 + max(1, T // 2 - 1))))
    mixed = [chunk for pair in zip(last, odd, strict=True) for chunk in pair]
    for chunks in (last, ends, odd, mixed):
        yield from _steps(chunks, T, requests)


def _steps(chunks: Sequence[Chunk], T: int, requests: int) -> Iterator[list[Chunk]]:
    step: list[Chunk] = []
    for chunk in chunks:
        if step and (sum(each.tokens for each in step) + chunk.tokens > T or len(step) == requests):
            yield step
            step = []
        step.append(chunk)
    yield step


def _nan(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=torch.bfloat16, device=device)
