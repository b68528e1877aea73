"""Faults that a kernel could really have, one or more a kernel, planted to see a gate catch them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from bridge.gates.bits import require_caught
from bridge.gates.card import DECODE, Card, Launch, Operands, altered_call
from isojax.kernels.calls import KernelCall, Parameter
from pallas_kernels.hopper_regions import region_program
from pallas_kernels.lm_head.hopper_sums import BLOCK
from pallas_kernels.seal import SealedModule, SealedProgram

#: A kernel that had a fault while all others were right: its name and its module's SHA-256.
Hit = tuple[str, str]


@dataclass(frozen=True)
class Fault:
    """A kernel sealed with other constants, or one that takes its operands wrongly.

    step: the only one of the program's kernels that has the fault; None gives it to all. coarse: also shows against a
    reference with a tolerance, not in equal bits alone.
    """

    name: str
    constants: tuple[tuple[str, Parameter], ...] = ()
    spoil: Callable[[Operands], dict[str, torch.Tensor]] = dict
    step: str | None = None
    coarse: bool = True

    def hits(self, program: SealedProgram) -> list[Hit]:
        """The program's kernel that has the fault while all others are right; none where several have it."""
        found = [module for module in program.modules if self.step in (None, module.name)]
        return [(_label(program, module), module.sha256) for module in found] if len(found) == 1 else []

    def launch(self, card: Card, target: SealedProgram) -> Launch:
        """Launches as the card does, but for `target`, which has the fault."""
        faulty = card.altered(target, dict(self.constants)) if self.constants else target
        steps = tuple(zip(target.kernels, faulty.kernels, strict=True)) if self.step else ()

        def run(program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
            if program is not target:
                return card.launch(program, operands)
            if not steps:
                return card.launch(faulty, {**operands, **self.spoil(operands)})
            values = dict(operands)
            for right, wrong in steps:
                if right.modules[0].name == self.step:
                    results = card.launch(wrong, {**values, **self.spoil(values)})
                else:
                    results = card.launch(right, values)
                values |= zip(right.results, results, strict=True)
            return tuple(values[name] for name in target.results)

        return run


def faults_of(program: SealedProgram, longest: int = 0) -> list[Fault]:
    """The faults of a program's kernels. longest: of attention's histories, since a split needs keys to cut."""
    made = _FAULTS[program.region](program, longest)
    steps = {None, *(module.name for module in program.modules)}
    return [fault for fault in made if fault.step in steps and (not fault.constants or _exists(program, fault))]


def require_all_caught(
    card: Card, program: SealedProgram, faults: Iterable[Fault], check: Callable[[Launch], object]
) -> list[Hit]:
    """Plants one fault after the other; returns the kernels that had one alone.

    Raises DifferenceFound where the check does not fail.
    """
    hit: list[Hit] = []
    for fault in faults:
        require_caught(fault.name, partial(check, fault.launch(card, program)))
        hit += fault.hits(program)
    return hit


def caught(parts: Iterable[Iterable[Hit]]) -> str:
    """How many kernels had a fault alone, by name, over the parts of a gate."""
    kernels = Counter(name for name, _ in {hit for part in parts for hit in part})
    return "every planted fault caught, in " + ", ".join(f"{kernels[name]} {name}" for name in sorted(kernels))


def faulty_call(program: SealedProgram, fault: Fault) -> KernelCall:
    """The call that a fault of constants seals."""
    return altered_call(program, dict(fault.constants))


def _matmul(program: SealedProgram, longest: int) -> list[Fault]:
    leaves = dict(program.constants)["leaves"]
    others = [Fault(f"{n} leaves", (("leaves", n),), coarse=False) for n in (1, 2, 4, 8) if n != leaves]
    possible = [fault for fault in others if _exists(program, fault)]
    return [*possible[:1], _last_step()]


def _gated_matmul(program: SealedProgram, longest: int) -> list[Fault]:
    # Few tokens are two kernels.
    return [
        _halves_exchanged("w", 0),
        _last_step(),
        _last_step("matmul"),
        _halves_exchanged("products", 1, "swiglu"),
    ]


def _norm(program: SealedProgram, longest: int) -> list[Fault]:
    return [_eps(program), Fault("the neighbouring column's weight", spoil=lambda o: {"w": o["w"].roll(1)})]


def _residual_add(program: SealedProgram, longest: int) -> list[Fault]:
    return [Fault("the neighbouring row's residual", spoil=lambda o: {"residual": o["residual"].roll(1, 0)})]


def _swiglu(program: SealedProgram, longest: int) -> list[Fault]:
    return [_halves_exchanged("gate_up", 1)]


def _qk_norm_rope(program: SealedProgram, longest: int) -> list[Fault]:
    angles = Fault("the neighbouring row's angles", spoil=lambda o: {"cos_sin": o["cos_sin"].roll(1, 0)})
    return [angles, _eps(program)] if "q_norm" in program.operands else [angles]


def _attention(program: SealedProgram, longest: int) -> list[Fault]:
    constants = dict(program.constants)
    scale, split = float(constants["scale"]), int(constants["split"])
    found = [Fault("the scale applied elsewhere", (("scale", scale * 1.25),))]
    if longest > split // 2:
        found.append(Fault("splits of half the size", (("split", split // 2),), coarse=False))
    return found


def _paged_attention(program: SealedProgram, longest: int) -> list[Fault]:
    def masked(operands: Operands) -> dict[str, torch.Tensor]:
        return {"positions": (operands["positions"] - 1).clamp(min=0)}

    pages = Fault("the neighbouring request's pages", spoil=lambda o: {"block_table": o["block_table"].roll(1, 0)})
    found = _attention(program, longest)
    heads = Fault("the neighbouring head's sums", step="combine", spoil=lambda o: {"acc": o["acc"].roll(1, 0)})
    # The reference of both kinds of tokens is made of one long chunk, and only single tokens go through the last two,
    # through the third only those of several splits.
    steps = [replace(found[0], step="tiles"), replace(found[0], step="decode", coarse=program.region == DECODE)]
    if longest > int(dict(program.constants)["split"]):
        steps.append(replace(heads, coarse=False))
    return [*found, Fault("the mask off by one", spoil=masked), pages, *steps]


def _paged_qk_norm_rope(program: SealedProgram, longest: int) -> list[Fault]:
    unwritten = Fault("keys and values not written", spoil=lambda o: {"slots": torch.full_like(o["slots"], -1)})
    return [*_qk_norm_rope(program, longest), unwritten]


def _log_prob_rows(program: SealedProgram, longest: int) -> list[Fault]:
    return [
        _temperature(),
        *_logits(),
        _temperature("blocks"),
        _neighbours("leaves", "sums"),
        _neighbours("constants", "leaf_sums"),
        _neighbours("rows", "constants"),
    ]


def _token_log_probs(program: SealedProgram, longest: int) -> list[Fault]:
    vocabulary = int(dict(program.constants)["vocab_size"])
    found = [_temperature(), *_logits(), _neighbours("leaves", "sums"), _neighbours("rows", "leaf_sums")]
    if vocabulary > BLOCK:
        found.append(Fault("the vocabulary's mask off by one", (("vocab_size", vocabulary - 1),), coarse=False))
    return found


def _temperature(step: str | None = None) -> Fault:
    return Fault("another temperature", step=step, spoil=lambda o: {"temperature": o["temperature"] * 1.5})


def _logits() -> list[Fault]:
    return [
        Fault("the neighbouring row of the last weights", step="tail", spoil=lambda o: {"w": o["w"].roll(1, 0)}),
        _last_step("logits"),
    ]


def _last_step(step: str | None = None) -> Fault:
    return Fault("the last step of K left out", step=step, spoil=lambda o: {"x": _without_end(o["x"])})


def _halves_exchanged(operand: str, axis: int, step: str | None = None) -> Fault:
    def exchanged(operands: Operands) -> dict[str, torch.Tensor]:
        gate, up = operands[operand].chunk(2, axis)
        return {operand: torch.cat([up, gate], axis)}

    return Fault("gate and up exchanged", step=step, spoil=exchanged)


def _neighbours(step: str, buffer: str) -> Fault:
    return Fault("the neighbouring row's sums", step=step, spoil=lambda o: {buffer: o[buffer].roll(1, -1)})


def _label(program: SealedProgram, module: SealedModule) -> str:
    return module.name if module.name == program.region else f"{program.region}.{module.name}"


def _eps(program: SealedProgram) -> Fault:
    return Fault("another epsilon", (("eps", float(dict(program.constants)["eps"]) * 4),))


def _without_end(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, -16:] = 0
    return x


def _exists(program: SealedProgram, fault: Fault) -> bool:
    call = faulty_call(program, fault)
    try:
        region_program(call.region, call.types, dict(call.parameters))
    except (ValueError, NotImplementedError):
        return False
    return True


_FAULTS: dict[str, Callable[[SealedProgram, int], list[Fault]]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "residual_add": _residual_add,
    "swiglu": _swiglu,
    "qk_norm_rope": _qk_norm_rope,
    "paged_qk_norm_rope": _paged_qk_norm_rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "paged_decode_attention": _paged_attention,
    "log_prob_rows": _log_prob_rows,
    "token_log_probs": _token_log_probs,
}
