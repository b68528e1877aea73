"""Operands for any program but attention's: rows with every hazard, and what a layer brings."""

from __future__ import annotations

import torch

from bridge.gates.bits import bits, failed
from bridge.gates.families import row_operands, tokens_of
from pallas_kernels.seal import SealedProgram

ROW_KINDS = 8
"""Rows repeat in this cycle: ordinary, mixed hazards, tiny, huge, subnormal, signed zeros, ties, cancelling."""


def make_operands(
    program: SealedProgram, device: torch.device, *, seed: int = 0, temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """Operands by name, the same for the same seed. Rows of bfloat16 have every hazard, which is checked."""
    rows, found = row_operands(program), {}
    for number, name in enumerate(program.operands):
        buffer = program.buffers[name]
        generator = torch.Generator(device).manual_seed(1000 * seed + number)
        if name == "temperature":
            found[name] = torch.tensor(temperature, device=device)
        elif name == "targets":
            found[name] = _targets(tokens_of(program), int(dict(program.constants)["vocab_size"]), generator)
        elif name == "slots":
            order = torch.randperm(tokens_of(program), generator=generator, device=device)
            found[name] = order.to(torch.int32)
        elif name in ("k_cache", "v_cache"):
            # Made at the launch: what it writes into them is a result.
            continue
        elif name == "cos_sin":
            angles = torch.rand(buffer.shape[0], buffer.shape[1] // 2, generator=generator, device=device) * 100
            found[name] = torch.cat([angles.cos(), angles.sin()], -1)
        elif name in rows:
            found[name] = hazardous_rows(buffer.shape, generator)
        else:
            found[name] = _weights(buffer.shape, generator)
            if name == "bias":
                # Where the halves are equal, a bias would hide what is left.
                found[name][1::2] = 0
    return found


def hazardous_rows(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 rows in the cycle of ROW_KINDS. Raises DifferenceFound where a hazard did not occur."""
    values = _normal(shape, generator).view(shape[0], -1)
    result = values.bfloat16()
    for kind, part in ((1, _mixed), (2, _tiny), (3, _huge), (4, _subnormal), (5, _zeros), (6, _ties), (7, _cancelling)):
        result[kind::ROW_KINDS] = part(values[kind::ROW_KINDS], generator)
    _require_hazards(result)
    return result.view(shape)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return _normal(shape, generator).bfloat16()
    weights = _normal(shape, generator).mul_(shape[-1] ** -0.5).bfloat16()
    # The halves of every second row are equal, so that with a cancelling row of x little but rounding is left.
    half = shape[-1] // 2
    weights[1::2, half : 2 * half] = weights[1::2, :half]
    return weights


def _targets(tokens: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=generator.device, dtype=torch.int32)
    targets[0], targets[-1] = vocabulary - 1, 0
    return targets


def _mixed(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Exponents over 2^-18 .. 2^18, subnormals and both zeros in one row."""
    exponents = torch.randint(-18, 19, values.shape, generator=generator, device=values.device)
    spread = (values * 2.0 ** exponents.float()).bfloat16()
    which = torch.rand(values.shape, generator=generator, device=values.device)
    for low, part in ((0.0, _subnormal), (0.04, _zeros)):
        spread = torch.where((which >= low) & (which < low + 0.04), part(values, generator), spread)
    return spread


def _tiny(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Of the size of a norm's epsilon, where it decides the result.
    return (values * 2.0**-10).bfloat16()


def _huge(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (values * 2.0**40).bfloat16()


def _subnormal(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    words = torch.randint(1, 127, values.shape, generator=generator, device=values.device).to(torch.int16)
    return torch.where(values < 0, words | -0x8000, words).view(torch.bfloat16)


def _zeros(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.where(values < 0, -0.0, 0.0).bfloat16()


def _ties(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half an ulp of one beside one: sums that lie between two bfloat16 values."""
    return torch.where(values < 0, 1.0, 2.0**-8).bfloat16()


def _cancelling(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The second half undoes the first but for every 32nd value: in the sum the order of additions shows."""
    half = values.shape[-1] // 2
    first = values[:, :half]
    nudge = 1 + 2.0**-7 * (torch.arange(half, device=values.device) % 32 == 0)
    return torch.cat([first, -first.bfloat16().float() * nudge, values[:, 2 * half :]], -1).bfloat16()


def _require_hazards(rows: torch.Tensor) -> None:
    words, size = bits(rows).int() & 0xFFFF, rows.float().abs()
    magnitude = words & 0x7FFF
    occurred = {
        "subnormals": (magnitude > 0) & (magnitude < 0x80),
        "positive zeros": words == 0,
        "negative zeros": words == 0x8000,
        "huge exponents": size > 2.0**30,
        "tiny exponents": (size < 2.0**-12) & (magnitude >= 0x80),
        "halves of an ulp": size == 2.0**-8,
    }
    missing = [name for name, where in occurred.items() if not bool(where.any())]
    if missing:
        raise failed("hazards", f"no {', '.join(missing)}", "all of them", "The rows must hold what can go wrong.")
