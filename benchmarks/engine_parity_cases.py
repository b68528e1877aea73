"""What the engine is put through: every path, batches from 1 up in mixed company, and rounds of many requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

PAGE = 16
Proof = Literal["chunk", "hit", "preempt"]


@dataclass(frozen=True)
class Case:
    """One call of the engine.

    prompts: how many, all sent at once; those that find no place wait for others to end. shortest, longest: of a
    prompt, in tokens, drawn uniformly. last: length of the last prompt, 0 for one like the others. new_tokens: of
    every completion. rows: full rows to compare. proof: what must have happened in the engine, or the case says
    nothing: a prefill chunk, a prefix cache hit in every request, a preemption.
    """

    name: str
    prompts: int
    shortest: int
    longest: int
    new_tokens: int
    rows: int
    seed: int
    last: int = 0
    proof: Proof | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are sampled."""
        return self.prompts * self.new_tokens


@dataclass(frozen=True)
class Sizes:
    """How large the cases are. batches: requests at once, ascending. tokens, prompts and rows of a round and of the
    preemption are of one call; a round's prompts are more than the largest batch, so that requests come and go. What
    is sampled around a sync has sizes of its own."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    decode_tokens: int = 64
    rows: int = 512
    round_prompts: int = 384
    round_tokens: int = 128
    round_longest: int = 200
    round_rows: int = 2048
    preempted_tokens: int = 200
    long_prompts: int = 24
    long_tokens: int = 32
    sync_prompts: int = 64
    sync_tokens: int = 32

    @property
    def cache_tokens(self) -> int:
        """Room for a round but not for the preemption case: half way between what the largest batch needs of both."""
        round_peak = self.round_longest / 2 + self.round_tokens
        return PAGE * math.ceil(self.batches[-1] * (round_peak + 2 * self.preempted_tokens) / 2 / PAGE)


def plan(
    sizes: Sizes, *, context: int, step_tokens: int, tokens: int, seed: int, on_card: bool, page: int = PAGE
) -> list[Case]:
    """All paths once, then rounds until at least `tokens` are sampled. context, step_tokens: the engine's limits. page:
    tokens of one in its cache.
    """
    cases = []
    # A hit is of whole pages, and the last token is always computed.
    hit = max(2 * PAGE, page) + 1
    long = min(3 * step_tokens + 5, context - 8)
    for batch in sizes.batches:
        few = min(sizes.rows, 4 * batch)
        cases += [
            Case(f"prefill, batch {batch}", batch, 1, sizes.round_longest, 1, few, seed),
            # A prompt that a step takes whole is cut only in company.
            *(
                [Case(f"chunked prefill, batch {batch}", batch, 1, 90, 4, few, seed + 1, last=long, proof="chunk")]
                if batch > 1 or long > step_tokens
                else []
            ),
            Case(f"cache hit, batch {batch}", batch, hit, hit + 67, 4, few, seed + 2, proof="hit"),
            Case(f"decode, batch {batch}", batch, 1, 60, sizes.decode_tokens, sizes.rows, seed + 3),
        ]
    # Histories of several splits, decoded in company.
    batch, name = sizes.long_prompts, f"long prompts, batch {sizes.long_prompts}"
    cases.append(Case(name, batch, context // 8, 3 * context // 8, sizes.long_tokens, sizes.rows, seed + 4))
    # Only the card's worker counts preemptions.
    if on_card:
        length, batch = sizes.preempted_tokens, sizes.batches[-1]
        cases.append(
            Case(f"preemption, batch {batch}", batch, length, length, length, sizes.rows, seed + 4, proof="preempt")
        )
    sampled = sum(case.tokens for case in cases)
    count = max(0, math.ceil((tokens - sampled) / (sizes.round_prompts * sizes.round_tokens)))
    cases += [
        Case(
            f"round {number + 1}, {sizes.round_prompts} requests",
            sizes.round_prompts,
            2 * PAGE,
            sizes.round_longest,
            sizes.round_tokens,
            sizes.round_rows,
            seed + 5 + number,
        )
        for number in range(count)
    ]
    return cases


@dataclass
class Prompts:
    """Windows of one long sequence of tokens, at random places; counts how many different ones were drawn."""

    corpus: np.ndarray
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    def draw(self, case: Case) -> tuple[list[list[int]], int]:
        """The prompts of a case, and how many of them no earlier case had."""
        generator = np.random.default_rng([case.seed, case.prompts, case.new_tokens])
        lengths = generator.integers(case.shortest, case.longest + 1, case.prompts)
        if case.last:
            lengths[-1] = case.last
        starts = generator.integers(0, len(self.corpus) - lengths)
        drawn = [self.corpus[start : start + n].tolist() for start, n in zip(starts, lengths, strict=True)]
        before = len(self._seen)
        self._seen.update(map(tuple, drawn))
        return drawn, len(self._seen) - before
