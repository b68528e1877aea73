"""What the gates of sealed kernels run on: a bundle, a device, and the launches of its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bridge.gates.bits import failed
from isojax.kernels.calls import KernelCall, Parameter
from pallas_kernels.attention import DECODE_REGION
from pallas_kernels.seal import SealedProgram
from pallas_kernels.store import Bundle

Operands = Mapping[str, torch.Tensor]
Launch = Callable[[SealedProgram, Operands], tuple[torch.Tensor, ...]]

WRITER = "paged_qk_norm_rope"
"""The region that writes keys and values into a cache's rows."""

DECODE = DECODE_REGION.name
"""The region whose kernel reads positions and requests while the launch before it runs."""


@dataclass
class Card:
    """A bundle's programs, ready to launch. make: compiles one. seal: gives the program of a call that has a fault."""

    bundle: Bundle
    device: torch.device
    make: Callable[[SealedProgram], Callable[..., tuple[torch.Tensor, ...]]]
    seal: Callable[[KernelCall], SealedProgram]
    _made: dict[int, tuple[SealedProgram, Callable[..., tuple[torch.Tensor, ...]]]] = field(default_factory=dict)

    def launch(self, program: SealedProgram, operands: Operands) -> tuple[torch.Tensor, ...]:
        """The program's results for operands by name, one row a token in each.

        Caches that a program writes into are made here, and the rows that it wrote are its results.
        """
        if id(program) not in self._made:
            # The program is kept beside its launch, so that its id stays its own.
            self._made[id(program)] = (program, self.make(program))
        _, run = self._made[id(program)]
        if program.region == WRITER:
            return _written(run, program, operands)
        if program.region == DECODE and self.device.type == "cuda":
            # In an engine whole layers lie between a step's positions and this; here they may be the launch before.
            torch.cuda.synchronize(self.device)
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


def _written(
    run: Callable[..., tuple[torch.Tensor, ...]], program: SealedProgram, operands: Operands
) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a program that puts the last two into caches, which hold NaN before."""
    slots = operands["slots"]
    _, page, K, D = program.buffers["k_cache"].shape
    # One page more than is written to: its last row is what a slot of -1 finds.
    shape = (int(slots.max().clamp(min=0)) // page + 2, page, K, D)
    caches = {name: torch.full(shape, float("nan"), device=slots.device).bfloat16() for name in ("k_cache", "v_cache")}
    q, *written = run(*({**operands, **caches}[name] for name in program.operands))
    rows = [cache.view(-1, K, D) for cache in written]
    others = torch.ones(len(rows[0]), dtype=torch.bool, device=slots.device)
    others[slots[slots >= 0].long()] = False
    for cache in rows:
        if not bool(cache[others].isnan().all()):
            raise failed(program.region, "rows of the cache that no slot names", "untouched", "It wrote elsewhere.")
    return q, *(cache[slots.long()] for cache in rows)
