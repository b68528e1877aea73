"""`isojax contract`: show, compare and check execution contracts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from contracts import diff, format_contract, format_diff, load_contract, parse_mesh
from contracts.errors import BadConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what a contract says")
    show.add_argument("contract", type=Path, metavar="CONTRACT", help="a contract's file or a policy folder")
    show.add_argument("--json", action="store_true", help="the whole contract as JSON")
    compare = actions.add_parser("diff", help="the fields in which two contracts differ, and what each one rotates")
    compare.add_argument("left", type=Path, metavar="LEFT")
    compare.add_argument("right", type=Path, metavar="RIGHT")
    check = actions.add_parser("check", help="whether a mesh is inside of what was proved")
    check.add_argument("contract", type=Path, metavar="CONTRACT", help="a contract's file or a policy folder")
    check.add_argument("--mesh", required=True, metavar="tp=4,ep=8", help="degrees by axis; others are 1")


def run(arguments: argparse.Namespace) -> int:
    """Show: 0. Diff: 0 if equal, 1 if not. Check: 0 if the mesh is claimed; a refusal is raised."""
    if arguments.action == "diff":
        differences = diff(load_contract(arguments.left), load_contract(arguments.right))
        print(format_diff(differences))
        return 1 if differences else 0
    contract = load_contract(arguments.contract)
    if arguments.action == "check":
        mesh = parse_mesh(arguments.mesh)
        if not mesh:
            raise BadConfig(
                field="--mesh",
                found=repr(arguments.mesh),
                allowed="at least one axis=degree, such as tp=1",
                reason="It names no mesh, so nothing would be checked.",
            )
        contract.check_mesh(mesh)
        print(f"{arguments.mesh}: proved for {contract.model.family} on {', '.join(contract.claims.device_kinds)}")
        return 0
    if arguments.json:
        print(json.dumps(json.loads(contract.canonical_bytes()), indent=2))
        return 0
    contract.validate_identities()
    print(format_contract(contract))
    return 0
