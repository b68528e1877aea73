"""`isojax export`: a training checkpoint as a policy folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from contracts.errors import BadConfig
from isojax.rl.export_checkpoint import export_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="runs/NAME/checkpoints/STEP, or runs/NAME for its newest"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="POLICY", help="the folder to write; must not exist")


def run(arguments: argparse.Namespace) -> int:
    """Export; 0 when the folder is written."""
    if arguments.out.exists():
        raise BadConfig(
            field="--out",
            found=str(arguments.out),
            allowed="a folder that does not exist",
            reason="What is there, perhaps the policy that a run started from, would be lost.",
        )
    step, digest = export_checkpoint(arguments.checkpoint, arguments.out)
    print(f"{arguments.out}: step {step}, weights {digest}")
    print(f"serve it with: vllm serve {arguments.out}")
    return 0
