"""What a run on a card needs before anything else: kernels sealed for the run's own shapes, and proved on that card."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from contracts import FILE_NAME, bits_float, check_temperature, load_contract
from contracts.errors import BadConfig, DifferenceFound
from isojax.evidence.gates import record_proof, run_gates, select_suites
from isojax.kernels import Bundle, KernelShapes, load_kernels
from isojax.policy.policy import Policy
from isojax.rl.config import Config
from isojax.rl.engine_defaults import DEFAULT_SEQUENCES, DEFAULT_STEP_TOKENS, count_setting
from pallas_kernels.kernel_shapes import TOKEN_STEP, TRAINER_STEP

TRAINER_LENGTHS = 3
"""Lengths of a packed batch: `train.micro_batch_tokens`, its half and its quarter, for what fills no more."""


def machine_arch() -> str:
    """The architecture that a run on this machine computes with: "sm90" on a Hopper card, else "cpu".

    Raises BadConfig for a card that there are no kernels for.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    capability = str(getattr(device, "compute_capability", "none"))
    if capability != "9.0":
        raise BadConfig(
            field="the machine's accelerator",
            found=f"{device.device_kind}, compute capability {capability}",
            allowed="a Hopper card (9.0: H100, H200), or JAX_PLATFORMS=cpu",
            reason="Equal bits are proved kernel by kernel, and there are kernels for these alone.",
        )
    return "sm90"


def run_shapes(config: Config, max_position: int) -> KernelShapes:
    """The shapes that this run's trainer and engine launch, and no others.

    Raises BadConfig where `train.micro_batch_tokens` is below 128 or an engine's setting is no count, and what
    `KernelShapes` refuses.
    """
    capacity = config.train.micro_batch_tokens // TRAINER_STEP * TRAINER_STEP
    if not capacity:
        raise BadConfig(
            field="train.micro_batch_tokens",
            found=config.train.micro_batch_tokens,
            allowed=f"{TRAINER_STEP} or more on a card",
            reason="The fused head takes tokens in blocks of this many.",
        )
    halved = {capacity >> times for times in range(TRAINER_LENGTHS)}
    settings = config.engine.settings
    sequences = count_setting(settings, "max_sequences", DEFAULT_SEQUENCES)
    return KernelShapes(
        token_buckets=tuple(_doubling(count_setting(settings, "max_step_tokens", DEFAULT_STEP_TOKENS))),
        head_rows=tuple(_doubling(sequences)),
        trainer_tokens=tuple(sorted(length for length in halved if length and length % TRAINER_STEP == 0)),
        page_size=count_setting(settings, "page_size", 0, least=0) or KernelShapes.page_size,
        max_requests=sequences,
        max_context=count_setting(settings, "max_context", 0, least=0),
    ).for_context(max_position)


def is_proved_for_run(source: Path, config: Config, wanted: KernelShapes) -> bool:
    """Whether `source` is an exported policy that holds all that this run would seal, proved on this kind of card.

    wanted: `run_shapes` of the run. Of an exported policy whose kernels are not taken stderr says why. The handshake
    compares ptxas later. Raises what `load_contract` and `load_kernels` do.
    """
    if not (source / FILE_NAME).is_file():
        return False
    contract = load_contract(source)
    if contract.arch.startswith("cpu-"):
        return False
    card = jax.devices()[0].device_kind
    temperature = bits_float(contract.semantics.temperature)
    mesh = config.train.mesh.degrees
    shapes = load_kernels(source, contract).shapes
    if contract.claims.state != "proved" or card not in contract.claims.device_kinds:
        missing = f"they are not proved on {card}"
    elif temperature != check_temperature(config.rollout.temperature):
        missing = f"their temperature is {temperature} and the run's {config.rollout.temperature}"
    elif contract.semantics.parameter_dtype != config.policy.dtype:
        missing = f"their dtype is {contract.semantics.parameter_dtype} and the run's {config.policy.dtype}"
    elif lacking := shapes.lacking(wanted):
        missing = f"they lack what the run needs of {', '.join(lacking)}"
    elif unclaimed := [axis for axis, degree in mesh.items() if degree not in contract.claims.axis(axis).allowed]:
        missing = f"they are not proved with the run's train.mesh.{' and train.mesh.'.join(unclaimed)}"
    else:
        return True
    print(f"isojax: the kernels of {source} are not taken, others are sealed and proved: {missing}", file=sys.stderr)
    return False


def seal_for_run(policy: Policy, shapes: KernelShapes) -> Bundle:
    """The policy's kernels for these shapes, lowered on all cores with a progress bar. Raises as `seal_policy`.

    What an earlier run sealed is taken from the folder of JAX's compilation cache, where there is one.
    """
    # Imported here: a run on a CPU needs nothing of the kernels' compiler.
    from isojax.kernels.kept import kept_or_sealed

    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    # JAX takes addresses of other stores too.
    kept = Path(folder) if folder and "://" not in folder else None
    return kept_or_sealed(policy, shapes, kept, processes=os.cpu_count() or 1)


def prove_for_run(folder: Path, arch: str, mesh: Mapping[str, int]) -> None:
    """Runs the gates of `arch` on the exported policy and writes what they proved into it. mesh: the run's degrees.

    Raises DifferenceFound, with the gate's own words, at the first that fails: nothing is trained on it then.
    """
    suites = select_suites(arch, folder, {axis: degree for axis, degree in mesh.items() if degree > 1})
    for suite in suites:
        suite.prepare()
    for result in run_gates([gate for suite in suites for gate in suite.gates]):
        print(f"proving this card: {result.name}, {result.seconds:.0f} s", file=sys.stderr, flush=True)
        if not result.passed:
            raise DifferenceFound(
                field=result.name, found=result.detail, allowed=result.claim, reason="This card is not proved."
            )
    record_proof(folder, suites)


def _doubling(most: int) -> Iterator[int]:
    """Powers of two from 8 on, the last one `most` rounded up to a multiple of 8."""
    last = -(-most // TOKEN_STEP) * TOKEN_STEP
    size = TOKEN_STEP
    while size < last:
        yield size
        size *= 2
    yield last
