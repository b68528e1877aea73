"""Faults that a kernel could really have, one or more a region, planted to see a gate catch them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from bridge.gates.card import Card, Launch, Operands, altered_call
from isojax.kernels.calls import KernelCall, Parameter
from pallas_kernels.hopper_regions import region_program
from pallas_kernels.lm_head.hopper_sums import BLOCK
from pallas_kernels.seal import SealedProgram


@dataclass(frozen=True)
class Fault:
    """A kernel sealed with other constants, or one that takes its operands wrongly.

    coarse: also shows against a reference with a tolerance, not in equal bits alone.
    """

    name: str
    constants: tuple[tuple[str, Parameter], ...] = ()
    spoil: Callable[[Operands], dict[str, torch.Tensor]] = dict
    coarse: bool = True

    def launch(self, card: Card, target: SealedProgram) -> Launch:
        """Launches as the card does, but for `target`, which has the fault."""
        faulty = card.altered(target, dict(self.constants)) if self.constants else target

        def run(program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
            if program is not target:
                return card.launch(program, operands)
            return card.launch(faulty, {**operands, **self.spoil(operands)})

        return run


def faults_of(program: SealedProgram, longest: int = 0) -> list[Fault]:
    """The faults of a program's kernels. longest: of attention's histories, since a split needs keys to cut."""
    made = _FAULTS[program.region](program, longest)
    return [fault for fault in made if not fault.constants or _exists(program, fault)]


def faulty_call(program: SealedProgram, fault: Fault) -> KernelCall:
    """The call that a fault of constants seals."""
    return altered_call(program, dict(fault.constants))


def _matmul(program: SealedProgram, longest: int) -> list[Fault]:
    leaves = dict(program.constants)["leaves"]
    others = [Fault(f"{n} leaves", (("leaves", n),), coarse=False) for n in (1, 2, 4, 8) if n != leaves]
    possible = [fault for fault in others if _exists(program, fault)]
    return [*possible[:1], Fault("the last step of K left out", spoil=lambda o: {"x": _without_end(o["x"])})]


def _norm(program: SealedProgram, longest: int) -> list[Fault]:
    return [_eps(program), Fault("the neighbouring column's weight", spoil=lambda o: {"w": o["w"].roll(1)})]


def _residual_add(program: SealedProgram, longest: int) -> list[Fault]:
    return [Fault("the neighbouring row's residual", spoil=lambda o: {"residual": o["residual"].roll(1, 0)})]


def _swiglu(program: SealedProgram, longest: int) -> list[Fault]:
    def exchanged(operands: Operands) -> dict[str, torch.Tensor]:
        gate, up = operands["gate_up"].chunk(2, -1)
        return {"gate_up": torch.cat([up, gate], -1)}

    return [Fault("gate and up exchanged", spoil=exchanged)]


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
    return [*_attention(program, longest), Fault("the mask off by one", spoil=masked), pages]


def _paged_qk_norm_rope(program: SealedProgram, longest: int) -> list[Fault]:
    unwritten = Fault("keys and values not written", spoil=lambda o: {"slots": torch.full_like(o["slots"], -1)})
    return [*_qk_norm_rope(program, longest), unwritten]


def _log_prob_rows(program: SealedProgram, longest: int) -> list[Fault]:
    return [Fault("another temperature", spoil=lambda o: {"temperature": o["temperature"] * 1.5})]


def _token_log_probs(program: SealedProgram, longest: int) -> list[Fault]:
    vocabulary = int(dict(program.constants)["vocab_size"])
    found = _log_prob_rows(program, longest)
    if vocabulary > BLOCK:
        found.append(Fault("the vocabulary's mask off by one", (("vocab_size", vocabulary - 1),), coarse=False))
    return found


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
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "residual_add": _residual_add,
    "swiglu": _swiglu,
    "qk_norm_rope": _qk_norm_rope,
    "paged_qk_norm_rope": _paged_qk_norm_rope,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "log_prob_rows": _log_prob_rows,
    "token_log_probs": _token_log_probs,
}
