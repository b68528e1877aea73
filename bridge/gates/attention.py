"""Attention's two forms give one history the same bits: packed as the trainer runs it, and paged as the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bridge.gates.bits import check_all, failed, require_equal
from bridge.gates.card import Card, Launch
from bridge.gates.families import Family, families, tokens_of
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.histories import (
    BLOCKS,
    PAGED,
    TILES,
    Histories,
    Pages,
    lengths_around,
    make_histories,
    packed_batches,
    packed_operands,
    sizes_of,
    steps_of,
)
from pallas_kernels.kernel_shapes import TOKEN_STEP
from pallas_kernels.seal import SealedProgram

#: Compares what a launch gives with the packed form's results.
Compare = Callable[[Launch], None]


def attention_bindings_gate(card: Card) -> str:
    """Paged attention gives packed attention's bits, in any packing, chunk or page, with stale NaN and padding."""
    found = families(card.bundle.programs)
    packed = [family for family in found if family.region == "attention"]
    paged = [family for family in found if family.region in PAGED]
    parts = check_all("attention_bindings", (part for family in packed for part in _parts(card, family, paged)))
    lengths = lengths_of(card, packed[0].largest)
    return f"{len(parts)} buckets over histories of {', '.join(map(str, lengths))} tokens; {caught(parts)}"


def lengths_of(card: Card, packed: SealedProgram) -> list[int]:
    """Around every block, tile, page and split, as long as the bundle's shapes allow."""
    shapes, split = card.bundle.shapes, int(dict(packed.constants)["split"])
    longest = min(shapes.max_context, tokens_of(packed) - TOKEN_STEP)
    return lengths_around((*BLOCKS, *TILES, shapes.page_size, split, 2 * split), longest)


def _parts(card: Card, family: Family, paged: Sequence[Family]) -> Iterator[tuple[str, Callable[[], list[Hit]]]]:
    largest = family.largest
    lengths = lengths_of(card, largest)
    histories = make_histories(sizes_of(largest), lengths, card.device)
    expected = run_packed(card.launch, largest, histories, range(len(lengths)))
    for program in family.programs:
        check: Compare = partial(compare_packed, program=program, histories=histories, expected=expected)
        seen = fitting(lengths, program)
        yield f"packed at {tokens_of(program)}", partial(_check, card, program, check, seen, program in family.ends)
    same = [
        other
        for other in paged
        if other.largest.constants == largest.constants and sizes_of(other.largest) == sizes_of(largest)
    ]
    for missing in set(PAGED) - {other.region for other in same}:
        raise failed("attention", f"no {missing} of {family}", "one", "The engine must have what the trainer has.")
    for other in same:
        pages = Pages(other.largest, histories)
        for program in other.programs:
            check = partial(compare_paged, program=program, pages=pages, expected=expected)
            yield (
                f"{other.region} at {tokens_of(program)}",
                partial(_check, card, program, check, lengths, program in other.ends),
            )


def fitting(lengths: Sequence[int], packed: SealedProgram) -> list[int]:
    """Those of the ascending lengths that fit into the packed form beside padding."""
    return [length for length in lengths if length <= tokens_of(packed) - TOKEN_STEP]


def run_packed(
    launch: Launch, program: SealedProgram, histories: Histories, order: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Each sequence's result, packed in this order. Raises DifferenceFound where padding is not zero."""
    found = {}
    for batch in packed_batches(histories.lengths, order, tokens_of(program)):
        operands = packed_operands(program, histories, batch)
        (out,) = launch(program, operands)
        require_zero(out[operands["segment_ids"] < 0], "packed padding")
        for sequence, at in batch:
            found[sequence] = out[at : at + len(histories.q[sequence])]
    return found


def require_zero(rows: torch.Tensor, what: str) -> None:
    """Raises DifferenceFound unless every value is positive zero."""
    require_equal(rows, torch.zeros_like(rows), what)


def _check(card: Card, program: SealedProgram, check: Compare, lengths: Sequence[int], faulty: bool) -> list[Hit]:
    check(card.launch)
    return require_all_caught(card, program, faults_of(program, max(lengths)) if faulty else (), check)


def compare_packed(
    launch: Launch, program: SealedProgram, histories: Histories, expected: dict[int, torch.Tensor]
) -> None:
    """All that fit, in reverse order, and the longest of them alone."""
    count = len(fitting(histories.lengths, program))
    for order in (range(count)[::-1], range(count)[-1:]):
        for sequence, found in run_packed(launch, program, histories, order).items():
            what = f"packed at {tokens_of(program)}, {len(found)} tokens, one of {len(order)} sequences"
            require_equal(found, expected[sequence], what)


def compare_paged(launch: Launch, program: SealedProgram, pages: Pages, expected: dict[int, torch.Tensor]) -> None:
    """The steps that the form takes, each row against the packed form's."""
    for step in steps_of(program, pages.histories.lengths):
        operands = pages.operands(program, step)
        out = launch(program, operands)[0]
        at = 0
        for chunk in step:
            what = (
                f"{program.region} at {tokens_of(program)}, tokens {chunk.start} to {chunk.stop}, a step of {len(step)}"
            )
            require_equal(out[at : at + chunk.tokens], expected[chunk.sequence][chunk.start : chunk.stop], what)
            at += chunk.tokens
        require_zero(out[at:], f"{program.region}, padding at {tokens_of(program)}")
