"""`isojax export`: a checkpoint or a model's weights as a policy folder, for sm90 with its sealed kernels."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from contracts import FILE_NAME, bits_float, load_contract
from contracts.errors import BadConfig
from isojax.export import export_policy
from isojax.kernels import Bundle, KernelShapes
from isojax.policy.policy import Parameters, Policy
from isojax.rl.checkpoint_policy import is_checkpoint, load_checkpoint
from isojax.weights.digest import digest
from isojax.weights.load import load
from isojax.weights.tokenizer import TokenizerFiles, tokenizer_files

_HELP = {
    "token_buckets": "tokens of an engine step; a step is padded to the next bucket",
    "head_rows": "rows of log-probabilities that one call computes",
    "trainer_tokens": "tokens of a trainer's micro-batch",
    "page_size": "tokens a page of the cache",
    "max_pages": "a bound on the pages of a layer's cache; one with fewer takes the same kernels",
    "max_requests": "requests that the engine runs at once",
    "max_context": "tokens of prompt and completion; 0 takes the policy's own limit",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="runs/NAME/checkpoints/STEP, runs/NAME for its newest, a Hugging Face folder, a .gguf file or a policy",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="POLICY", help="the folder to write; must not exist")
    parser.add_argument("--arch", choices=("cpu", "sm90"), default="cpu", help="sm90 seals kernels (default: cpu)")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="that seal kernels at once (default: cores)"
    )
    group = parser.add_argument_group("shapes of sealed kernels, with --arch sm90; lists are separated by commas")
    for field in dataclasses.fields(KernelShapes):
        several = isinstance(field.default, tuple)
        shown = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        group.add_argument(
            _flag(field.name),
            type=_integers if several else int,
            metavar="N,N,..." if several else "N",
            help=f"{_HELP[field.name]} (default: {shown})",
        )


def run(arguments: argparse.Namespace) -> int:
    """Export; 0 when the folder is written."""
    if arguments.out.exists():
        raise BadConfig(
            field="--out",
            found=str(arguments.out),
            allowed="a folder that does not exist",
            reason="What is there, perhaps the policy that a run started from, would be lost.",
        )
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(KernelShapes)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.arch == "cpu" and given:
        raise BadConfig(
            field=_flag(next(iter(given))),
            found=next(iter(given.values())),
            allowed="only with --arch sm90",
            reason="The CPU form is compiled where it runs and has no sealed shapes.",
        )
    if arguments.processes < 1:
        raise BadConfig(
            field="--processes", found=arguments.processes, allowed="a positive integer", reason="It is a count."
        )
    shapes = KernelShapes(**given)
    source = _read(arguments.source)
    kernels = None if arguments.arch == "cpu" else _seal(source.policy, shapes, arguments.processes)
    export_policy(
        arguments.out,
        source.policy,
        source.params,
        source.tokenizer_files,
        temperature=source.temperature,
        arch=arguments.arch,
        kernels=kernels,
    )
    print(f"{arguments.out}: {source.what}, weights {source.weight_digest}")
    if kernels is None:
        print(f"serve it with: vllm serve {arguments.out}")
    else:
        print(f"{len(kernels.programs)} region calls, {len(kernels.modules)} kernels, manifest {kernels.sha256}")
        print(f"unproved: run `isojax verify --arch sm90 {arguments.out}` on the card")
    return 0


class _Source(NamedTuple):
    what: str
    weight_digest: str
    policy: Policy
    params: Parameters
    tokenizer_files: TokenizerFiles
    temperature: float


def _read(path: Path) -> _Source:
    if is_checkpoint(path):
        found = load_checkpoint(path)
        return _Source(
            f"step {found.step}",
            found.weight_digest,
            found.policy,
            found.params,
            found.tokenizer_files,
            found.temperature,
        )
    policy, params = load(path)
    # An exported policy keeps its one temperature; a model that was never exported starts at 1.
    exported = (path / FILE_NAME).exists()
    temperature = bits_float(load_contract(path).semantics.temperature) if exported else 1.0
    return _Source(path.name, digest(params), policy, params, tokenizer_files(path), temperature)


def _seal(policy: Policy, shapes: KernelShapes, processes: int) -> Bundle:
    # Imported here: an export for the CPU needs nothing of the kernels' compiler.
    from isojax.kernels.sealing import seal_policy

    return seal_policy(policy, shapes, processes=processes, show_progress=True)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
