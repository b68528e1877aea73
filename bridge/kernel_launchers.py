"""The sealed kernels of a loaded policy, found by the call that they serve: what the torch ops run on a card."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from contracts.errors import BadBundle, LaunchRefused
from pallas_kernels.region import REGIONS

if TYPE_CHECKING:
    from bridge.launcher import Compiler
    from pallas_kernels.seal import SealedProgram

logger = logging.getLogger(__name__)

TRAINER_REGIONS = ("attention", "qk_norm_rope", "token_log_probs")
"""Regions that only a trainer calls: an engine need not compile their kernels."""
HEAD_REGION = "log_prob_rows"
"""The region whose rows are padded to buckets of their own, since few rows of a step become log-probabilities."""

Launch = Callable[..., tuple[torch.Tensor, ...]]
_Call = tuple[Any, ...]


class KernelLaunchers:
    """Launches a region's kernels by (region, parameters, shapes of the operands): one dict lookup a call.

    Dtypes, strides and addresses are checked by the launcher itself.
    """

    def __init__(self) -> None:
        self._launches: dict[_Call, tuple[Launch, SealedProgram]] = {}
        # Positions of operands whose first size is only a bound in the bundle: those of the cache.
        self._bounded: dict[str, frozenset[int]] = {}
        self._recording: dict[str, set[str]] | None = None

    def add(self, programs: Iterable[SealedProgram], make: Callable[[SealedProgram], Launch]) -> None:
        """Adds programs; `make` compiles one. Raises BadBundle where other kernels serve the same call already."""
        for program in programs:
            buffers = [program.buffers[name] for name in program.operands]
            bounded = frozenset(index for index, buffer in enumerate(buffers) if buffer.leading_at_most)
            constants = dict(program.constants)
            parameters = tuple(constants[name] for name in REGIONS[program.region].parameters)
            shapes = (b.shape[1:] if index in bounded else b.shape for index, b in enumerate(buffers))
            call = (program.region, parameters, *shapes)
            known = self._launches.get(call)
            if known is None:
                self._bounded[program.region] = bounded
                self._launches[call] = (make(program), program)
            elif known[1].digests != program.digests:
                raise BadBundle(
                    field=f"kernels of region {program.region}",
                    found=", ".join(program.digests),
                    allowed=", ".join(known[1].digests),
                    reason="This process runs another policy's kernels for the same call; start a process of its own.",
                )

    def launch(
        self, region: str, operands: Sequence[torch.Tensor], parameters: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        """Runs the kernels of a call on torch's current stream.

        Raises LaunchRefused for a call without kernels, with the sizes that there are.
        """
        if bounded := self._bounded.get(region):
            shapes = [x.shape[1:] if index in bounded else x.shape for index, x in enumerate(operands)]
        else:
            shapes = [x.shape for x in operands]
        values = tuple([parameters[name] for name in REGIONS[region].parameters])
        found = self._launches.get((region, values, *shapes))
        if found is None:
            raise self._missing(region, operands, parameters)
        launch, program = found
        if self._recording is not None:
            self._recording.setdefault(region, set()).update(program.digests)
        return launch(*operands)

    @contextmanager
    def recording(self, into: dict[str, set[str]]) -> Iterator[None]:
        """Writes the digests of every kernel that is launched inside, by region, into a dict."""
        before, self._recording = self._recording, into
        try:
            yield
        finally:
            self._recording = before

    def digests(self, region: str) -> frozenset[str]:
        """SHA-256 of every kernel that was compiled for a region."""
        programs = (program for call, (_, program) in self._launches.items() if call[0] == region)
        return frozenset(digest for program in programs for digest in program.digests)

    def _missing(self, region: str, operands: Sequence[torch.Tensor], parameters: Mapping[str, Any]) -> LaunchRefused:
        # Of a call the region's name comes first, then its parameters, then the operands' shapes.
        sizes = sorted({call[2][0] for call in self._launches if call[0] == region})
        found = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in operands)
        return LaunchRefused(
            field=f"region {region}",
            found=f"{found}, {dict(parameters)}",
            allowed=f"first operands of {', '.join(map(str, sizes))} rows" if sizes else "nothing: it has no kernels",
            reason="The policy's bundle holds no kernel for this call, and none is ever lowered in the engine.",
        )


LAUNCHERS = KernelLaunchers()
"""Those of this process. A torch op is given tensors and nothing of the policy that called it."""


def engine_programs(
    programs: Iterable[SealedProgram], token_buckets: Sequence[int], head_rows: Sequence[int]
) -> list[SealedProgram]:
    """The programs that an engine with these buckets can call."""
    chosen = []
    for program in programs:
        rows = program.buffers[program.operands[0]].shape[0]
        buckets = head_rows if program.region == HEAD_REGION else token_buckets
        if program.region not in TRAINER_REGIONS and rows in buckets:
            chosen.append(program)
    return chosen


@cache
def _compiler(device: torch.device) -> Compiler:
    """One a card and process, so that an engine started anew finds its kernels compiled."""
    from bridge.launcher import Compiler

    return Compiler(device)


def compile_kernels(programs: Sequence[SealedProgram], device: torch.device) -> float:
    """Compiles programs in threads, with a progress bar, and makes them callable; returns the seconds it took.

    To be called before the first CUDA graph is captured: a thread that loads a module breaks a capture. Raises
    LaunchRefused, ToolchainMismatch and BadBundle.
    """
    # Imported here: it loads Pallas, which an engine on a CPU never needs.
    from bridge.launcher import Launcher

    start = time.perf_counter()
    compiler = _compiler(device)
    modules = {module.sha256 for program in programs for module in program.modules}
    with tqdm(total=len(modules), desc="compiling sealed kernels", leave=False) as bar:
        compiler.compile_all(programs, progress=lambda done, total: bar.update(done - bar.n))
    LAUNCHERS.add(programs, lambda program: Launcher(program, compiler))
    seconds = time.perf_counter() - start
    logger.info("Compiled %d sealed kernels of %d region calls in %.1f s", len(modules), len(programs), seconds)
    return seconds
