"""Operands for any program of a bundle, attention included."""

from __future__ import annotations

import torch

from bridge.gates.card import Card
from bridge.gates.families import tokens_of
from bridge.gates.histories import (
    ATTENTION,
    Pages,
    make_histories,
    packed_batches,
    packed_operands,
    sizes_of,
    steps_of,
)
from bridge.gates.operands import make_operands
from pallas_kernels.kernel_shapes import TOKEN_STEP
from pallas_kernels.seal import SealedProgram


def operands_of(card: Card, program: SealedProgram) -> dict[str, torch.Tensor]:
    """One full batch for this program, with hazards."""
    if program.region not in ATTENTION:
        return make_operands(program, card.device, seed=5)
    shapes, tokens = card.bundle.shapes, tokens_of(program)
    longest = min(shapes.max_context, max(shapes.trainer_tokens) - TOKEN_STEP)
    if program.region == "attention":
        longest = min(longest, tokens - TOKEN_STEP)
    lengths = [longest, *(length for length in (longest // 2, 17, 1) if 0 < length < longest)]
    histories = make_histories(sizes_of(program), lengths, card.device)
    if program.region == "attention":
        batch = next(packed_batches(lengths, range(len(lengths)), tokens))
        return packed_operands(program, histories, batch)
    return Pages(program, histories).operands(program, max(steps_of(program, lengths), key=len))
