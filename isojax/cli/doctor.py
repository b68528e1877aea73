"""`isojax doctor`: what is installed here and what will work."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from isojax.evidence.doctor import diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0, since a missing extra is no fault."""
    found = diagnose()
    print(json.dumps(asdict(found), indent=2) if arguments.json else found)
    return 0
