"""`isojax verify`: run the gates on this machine, list what each one proves, and record a policy's proof."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from contracts import ExecutionContract, parse_mesh
from isojax.evidence.gates import ARCHITECTURES, record_proof, run_gates, select_gates, select_suites


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="with --arch sm90: prove this policy's kernels, and write that into its contract when all gates pass",
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default="cpu", help="whose gates to run (default: cpu)")
    parser.add_argument(
        "--mesh",
        default="",
        metavar="AXIS=DEGREE,...",
        help="with --arch sm90: prove also that so many cards give one card's bits, as dp=2 or dp=2,fsdp=4",
    )
    parser.add_argument("--gate", metavar="NAME", action="append", help="only this one; may be given several times")
    parser.add_argument("--json", action="store_true", help="for programs: one object with a list of results")


def run(arguments: argparse.Namespace) -> int:
    """Run the gates; 0 if all pass, 1 if one fails."""
    mesh = parse_mesh(arguments.mesh)
    suites = select_suites(arguments.arch, arguments.folder, mesh)
    gates = select_gates(suites, arguments.gate)
    for suite in suites:
        suite.prepare()
    results = []
    for result in run_gates(gates):
        results.append(result)
        if not arguments.json:
            print(
                f"{'pass' if result.passed else 'FAIL'}  {result.name:32} {result.seconds:6.1f} s  {result.detail}",
                flush=True,
            )
    passed = all(result.passed for result in results)
    proved = None
    if arguments.folder is not None and passed and not arguments.gate:
        proved = record_proof(arguments.folder, suites)
    if arguments.json:
        table = {"arch": arguments.arch, "gates": [asdict(result) for result in results]}
        print(json.dumps(table | ({"proof": proved and _describe(proved)} if arguments.folder else {}), indent=2))
    else:
        print(f"{sum(result.passed for result in results)} of {len(results)} gates pass")
        if arguments.folder is not None:
            _summarise(arguments, mesh, proved)
    return 0 if passed else 1


def _describe(proved: ExecutionContract) -> dict[str, object]:
    return {
        "device_kinds": list(proved.claims.device_kinds),
        "meshes": _meshes(proved),
        "ptxas": proved.toolchain.ptxas,
        "kernel_manifest": proved.toolchain.kernel_manifest,
        "numerical_policy": proved.validate_identities().numerical_policy,
    }


def _meshes(proved: ExecutionContract) -> dict[str, list[int]]:
    """The degrees that are claimed, by axis, of those that have more than one."""
    return {claim.axis: list(claim.allowed) for claim in proved.claims.topology if len(claim.allowed) > 1}


def _summarise(arguments: argparse.Namespace, mesh: Mapping[str, int], proved: ExecutionContract | None) -> None:
    if proved is None:
        why = "only some gates ran" if arguments.gate else "a gate failed"
        print(f"{arguments.folder}: its contract is unchanged, since {why}")
        return
    print(f"{arguments.folder}: proved on {', '.join(proved.claims.device_kinds)}, ptxas {proved.toolchain.ptxas}")
    print(f"numerical policy {proved.validate_identities().numerical_policy}")
    meshes = [f"{axis} in {', '.join(map(str, degrees))}" for axis, degrees in _meshes(proved).items()]
    print(f"claimed of meshes: {'; '.join(meshes) or 'one card'}")
    if lost := [axis for axis, degree in mesh.items() if degree not in proved.claims.axis(axis).allowed]:
        print(
            f"not claimed: {', '.join(lost)} as asked for, since another kind of card is claimed on which it was not "
            "proved; export the policy anew to claim this kind alone"
        )
    print("not proved here: the engine as a whole (benchmarks/engine_parity.py)")
