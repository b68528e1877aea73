"""Each region against a float64 evaluation of its spec, within the rounding that the spec declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from bridge.gates.bits import check_all, failed
from bridge.gates.card import DECODE, Card, Launch, Operands
from bridge.gates.families import Family, families, row_operands, tokens_of
from bridge.gates.faults import Hit, caught, faults_of, require_all_caught
from bridge.gates.histories import ATTENTION, Chunk, Pages, make_histories, packed_operands, sizes_of
from bridge.gates.operands import make_operands
from pallas_kernels.seal import SealedProgram

# u: half an ulp, relative. A product that K terms enter is summed in steps of 16 by the tensor cores, which cut each
# partial sum to float32: an error below a float32 ulp of the sum of absolute values a step.
U16, U32 = 2.0**-8, 2.0**-24
ROWS = 64
"""Rows that are evaluated: several of each kind of hazard."""
LENGTH = 700
"""Positions of a history in which a planted fault shows: in a longer one its roundings hide what a position does."""
BEYOND = 188
"""Positions of a longer one's second split."""
SUBNORMAL = 2.0**-100
"""Absolute slack: what flushed subnormals can move."""

#: A value and how far from it the kernel may be, both float64.
Expected = tuple[torch.Tensor, torch.Tensor]
Constants = Mapping[str, int | float | bool | str]


def reference_gate(card: Card) -> str:
    """Every region is within its declared roundings of a float64 evaluation of its spec."""
    parts = check_all("reference", (part for family in families(card.bundle.programs) for part in _parts(card, family)))
    return f"{len(parts)} calls; {caught(parts)}"


def _parts(card: Card, family: Family) -> Iterator[tuple[str, Callable[[], list[Hit]]]]:
    yield str(family), partial(_check, card, family.largest)


def _check(card: Card, program: SealedProgram) -> list[Hit]:
    if program.region in ATTENTION:
        operands, expected, rows = _attention_case(card, program, LENGTH)
    else:
        made = make_operands(program, card.device, seed=7)
        # The contract's T is an operand; one that is not 1 shows where it is applied.
        operands = {**made, "temperature": torch.tensor(0.6, device=card.device)} if "temperature" in made else made
        rows = slice(0, min(ROWS, tokens_of(program)))
        per_row = row_operands(program)
        chosen = {name: value[rows] if name in per_row else value for name, value in operands.items()}
        expected = _REFERENCES[program.region](chosen, dict(program.constants))

    def compare(launch: Launch) -> None:
        _require_all_close(program, launch(program, operands), expected, rows)

    compare(card.launch)
    if program.region in ATTENTION and LENGTH < (split := int(dict(program.constants)["split"])) < _longest(card):
        # None of that history's rows has more than one split.
        longer, longer_expected, longer_rows = _attention_case(card, program, split + BEYOND)
        _require_all_close(program, card.launch(program, longer), longer_expected, longer_rows)
    return require_all_caught(card, program, [fault for fault in faults_of(program) if fault.coarse], compare)


def _require_all_close(
    program: SealedProgram, results: Sequence[torch.Tensor], expected: list[Expected], rows: slice
) -> None:
    for found, (value, tolerance) in zip(results, expected, strict=True):
        _require_close(program.region, found[rows].double(), value, tolerance)


def _require_close(region: str, found: torch.Tensor, value: torch.Tensor, tolerance: torch.Tensor) -> None:
    error = (found - value).abs()
    # NaN compares as false, so it is outside too.
    wrong = ~(error <= tolerance + SUBNORMAL)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise failed(
            region,
            f"{int(wrong.sum())} of {value.numel()} values too far, at {place} first: {float(found[place])!r}",
            f"{float(value[place])!r} within {float(tolerance[place]):.3g}",
            "The kernel rounds more than its spec says, or computes something else.",
        )


def _product(x: torch.Tensor, w: torch.Tensor) -> Expected:
    """x w^T, and the error of summing it in float32."""
    x, w = x.double(), w.double()
    steps = x.shape[-1] / 16 + 32
    return x @ w.T, (x.abs() @ w.abs().T) * (2 * U32 * steps)


def _rounded(value: torch.Tensor, error: torch.Tensor, roundings: int = 1) -> Expected:
    """After rounding to bfloat16 this often."""
    return value, error * (1 + 4 * U16) + (value.abs() + error) * (roundings * U16 * 1.05)


def _matmul(operands: Operands, constants: Constants) -> list[Expected]:
    value, error = _product(operands["x"], operands["w"])
    if constants["out_dtype"] == "bfloat16":
        value, error = _rounded(value, error)
    if "bias" in operands:
        value, error = _rounded(value + operands["bias"].double(), error)
    return [(value, error)]


def _gated_matmul(operands: Operands, constants: Constants) -> list[Expected]:
    value, error = _rounded(*_product(operands["x"], operands["w"]))
    gate, up = value.chunk(2, -1)
    gate_off, up_off = error.chunk(2, -1)
    silu = gate * torch.sigmoid(gate)
    # silu is nowhere steeper than 1.1.
    off = 1.1 * gate_off * (up.abs() + up_off) + silu.abs() * up_off
    return [_rounded(silu * up, off + silu.abs() * up.abs() * 2.0**-14 + _vanishing(gate, up), 2)]


def _normed(x: torch.Tensor, w: torch.Tensor, constants: Constants) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + float(constants["eps"])) * w.double()


def _rms_norm(operands: Operands, constants: Constants) -> list[Expected]:
    normed = _normed(operands["x"].double(), operands["w"], constants)
    return [_rounded(normed, normed.abs() * 2.0**-14, 2)]


def _add_rms_norm(operands: Operands, constants: Constants) -> list[Expected]:
    ((total, error),) = _residual_add(operands, constants)
    # The rounded sum is what is normed, and its bits are known: a float32 addition has one result.
    normed = _normed(total, operands["w"], constants)
    return [_rounded(normed, normed.abs() * 2.0**-14, 2), (total, error)]


def _residual_add(operands: Operands, constants: Constants) -> list[Expected]:
    total = (operands["x"].float() + operands["residual"].float()).bfloat16().double()
    return [(total, torch.zeros_like(total))]


def _swiglu(operands: Operands, constants: Constants) -> list[Expected]:
    gate, up = operands["gate_up"].double().chunk(2, -1)
    value = gate * torch.sigmoid(gate) * up
    return [_rounded(value, value.abs() * 2.0**-14 + _vanishing(gate, up), 2)]


def _vanishing(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    # Below a gate of -87 the quotient has no float32 normal number any more.
    return torch.where(gate < -80, 2.0**-110 * up.abs(), 0.0)


def _qk_norm_rope(operands: Operands, constants: Constants) -> list[Expected]:
    table = operands["cos_sin"].double()[:, None, :]
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    found = []
    q, k, *rest = _heads(operands, constants)
    for x, weight in ((q, operands.get("q_norm")), (k, operands.get("k_norm"))):
        normed = x if weight is None else _normed(x, weight, constants)
        first, second = normed[..., :half], normed[..., half:]
        value = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        size = torch.cat([(first * cos).abs() + (second * sin).abs(), (second * cos).abs() + (first * sin).abs()], -1)
        found.append(_rounded(value, size * (2.0**-14 + (2.1 * U16 if weight is not None else 0.0))))
    return found + [(value, torch.zeros_like(value)) for value in rest]


def _heads(operands: Operands, constants: Constants) -> list[torch.Tensor]:
    """Query, key and value heads of a packed projection."""
    D, keys = operands["cos_sin"].shape[-1], int(constants["key_heads"])
    heads = operands["qkv"].double().unflatten(-1, (-1, D))
    return list(heads.split([heads.shape[1] - 2 * keys, keys, keys], 1))


def _log_prob_rows(operands: Operands, constants: Constants) -> list[Expected]:
    vocabulary, temperature = int(constants["vocab_size"]), operands["temperature"].double()
    logits, error = _product(operands["x"], operands["w"][:vocabulary])
    scaled = logits / temperature
    value = torch.log_softmax(scaled, -1)
    # What one logit is off by moves its row's sum at most as far.
    off = (error / temperature).amax(-1, keepdim=True) * 2
    sizes = 1 + value.abs() + scaled.abs().amax(-1, keepdim=True)
    return [(value, off + sizes * 2.0**-20)]


def _token_log_probs(operands: Operands, constants: Constants) -> list[Expected]:
    ((value, tolerance),) = _log_prob_rows(operands, constants)
    targets = operands["targets"].long()[:, None]
    return [(value.gather(1, targets)[:, 0], tolerance.gather(1, targets)[:, 0])]


def _longest(card: Card) -> int:
    """Positions of the longest history that trainer and engine can both hold."""
    return min(card.bundle.shapes.max_context, max(card.bundle.shapes.trainer_tokens) - 8)


def _attention_case(
    card: Card, program: SealedProgram, most_positions: int
) -> tuple[dict[str, torch.Tensor], list[Expected], slice]:
    """A whole sequence of ordinary rows: packed, or as one chunk of queries at the end of its pages, or one by one."""
    tokens, longest = tokens_of(program), min(_longest(card), most_positions)
    length = min(longest, tokens - 8) if program.region == "attention" else longest
    histories = make_histories(sizes_of(program), [length], card.device, hazards=False)
    if program.region == "attention":
        operands, start = packed_operands(program, histories, [(0, 0)]), 0
    else:
        # One by one each query is a request, all over the same pages; one request more has none.
        requests = program.buffers["block_table"].shape[0]
        most = max(1, min(tokens, requests - 1)) if program.region == DECODE else tokens
        start = max(0, length - most)
        chunks = [Chunk(0, at, at + 1) for at in range(start, length)]
        chunks = chunks if program.region == DECODE else [Chunk(0, start, length)]
        operands = Pages(program, histories).operands(program, chunks)
    expected = _attention(histories.q[0], histories.k[0], histories.v[0], float(dict(program.constants)["scale"]))
    value, tolerance = (part[start:] for part in expected)
    return operands, [(value, tolerance)], slice(0, length - start)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Expected:
    """Causal attention; weights are rounded to bfloat16 for the product with the values."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    size = torch.einsum("nhd,lhd->hnl", q.abs(), k.abs()) * scale
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    value, sums = (torch.einsum("hnl,lhd->nhd", weights, part) for part in (v, v.abs()))
    off = 2 * float(size.max()) * 2 * U32 * (q.shape[-1] / 16 + 4) + 2.0**-14
    return _rounded(value, sums * (U16 * 1.05 + off))


_REFERENCES: dict[str, Callable[[Operands, Constants], list[Expected]]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "residual_add": _residual_add,
    "swiglu": _swiglu,
    "qk_norm_rope": _qk_norm_rope,
    "paged_qk_norm_rope": _qk_norm_rope,
    "log_prob_rows": _log_prob_rows,
    "token_log_probs": _token_log_probs,
}
