"""`isojax contract`: show, compare and check execution contracts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from contracts import bits_float, diff, format_diff, load_contract, parse_mesh


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
        contract.check_mesh(parse_mesh(arguments.mesh))
        print(f"{arguments.mesh}: proved for {contract.model.family} on {', '.join(contract.claims.device_kinds)}")
        return 0
    if arguments.json:
        print(json.dumps(json.loads(contract.canonical_bytes()), indent=2))
        return 0
    model, identities = contract.model, contract.validate_identities()
    print(f"model          {model.family}, {model.architecture}")
    print(f"cases          {', '.join(contract.cases)}")
    print(f"temperature    {bits_float(contract.semantics.temperature)}")
    print(f"claims         {contract.claims.state}, on {', '.join(contract.claims.device_kinds) or 'no device yet'}")
    for claim in contract.claims.topology:
        print(f"  {claim.axis:12} {claim.kind:9} {', '.join(map(str, claim.allowed))}  (gate {claim.gate})")
    print("composition")
    for entry in contract.composition:
        kernels = f", {len(entry.kernel_digests)} kernels" if entry.kernel_digests else ""
        print(
            f"  {entry.region:16} {entry.impl_id} {entry.version} on {entry.arch}{kernels}  [{', '.join(entry.cases)}]"
        )
    print("toolchain")
    for name, value in contract.toolchain.model_dump().items():
        print(f"  {name:16} {'-' if value is None else value}")
    print("identities")
    for name in ("semantic", "numerical_policy", "deployment"):
        print(f"  {name:16} {getattr(identities, name)}")
    return 0
