"""What the gates of sealed kernels run on: a bundle, a device, and the launches of its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from isojax.kernels.calls import KernelCall, Parameter
from pallas_kernels.seal import SealedProgram
from pallas_kernels.store import Bundle

Operands = Mapping[str, torch.Tensor]
Launch = Callable[[SealedProgram, Operands], tuple[torch.Tensor, ...]]


@dataclass
class Card:
    """A bundle's programs, ready to launch. make: compiles one. seal: gives the program of a call that has a fault."""

    bundle: Bundle
    device: torch.device
    make: Callable[[SealedProgram], Callable[..., tuple[torch.Tensor, ...]]]
    seal: Callable[[KernelCall], SealedProgram]
    _made: dict[int, tuple[SealedProgram, Callable[..., tuple[torch.Tensor, ...]]]] = field(default_factory=dict)

    def launch(self, program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
        """The program's results for operands by name."""
        if id(program) not in self._made:
            # The program is kept beside its launch, so that its id stays its own.
            self._made[id(program)] = (program, self.make(program))
        _, run = self._made[id(program)]
        return run(*(operands[name] for name in program.operands))

    def altered(self, program: SealedProgram, constants: Mapping[str, Parameter]) -> SealedProgram:
        """The same call sealed with other constants: a kernel with a fault."""
        return self.seal(altered_call(program, constants))


def call_of(program: SealedProgram) -> KernelCall:
    """The call that a program serves."""
    types = tuple((program.buffers[name].shape, program.buffers[name].dtype) for name in program.operands)
    return KernelCall(program.region, types, program.constants)


def altered_call(program: SealedProgram, constants: Mapping[str, Parameter]) -> KernelCall:
    """The program's call with other constants."""
    return call_of(program)._replace(parameters=tuple(sorted({**dict(program.constants), **constants}.items())))
