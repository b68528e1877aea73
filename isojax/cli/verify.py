"""`isojax verify`: run the gates on this machine and list what each one proves."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from isojax.evidence.gates import ARCHITECTURES, run_gates, select_gates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--arch", choices=ARCHITECTURES, default="cpu", help="whose gates to run (default: cpu)")
    parser.add_argument("--gate", metavar="NAME", action="append", help="only this one; may be given several times")
    parser.add_argument("--json", action="store_true", help="for programs: one object with a list of results")


def run(arguments: argparse.Namespace) -> int:
    """Run the gates; 0 if all pass, 1 if one fails."""
    results = []
    for result in run_gates(select_gates(arguments.arch, arguments.gate)):
        results.append(result)
        if not arguments.json:
            print(
                f"{'pass' if result.passed else 'FAIL'}  {result.name:32} {result.seconds:6.1f} s  {result.detail}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps({"arch": arguments.arch, "gates": [asdict(result) for result in results]}, indent=2))
    failed = sum(not result.passed for result in results)
    if not arguments.json:
        print(f"{len(results) - failed} of {len(results)} gates pass")
    return 1 if failed else 0
