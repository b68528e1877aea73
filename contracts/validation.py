"""Whether the sections of a contract fit together."""

from typing import TYPE_CHECKING

from contracts.composition import CompositionEntry
from contracts.errors import BadContract
from contracts.identities import identity_fields
from contracts.mesh_check import why_uncuttable

if TYPE_CHECKING:
    from contracts.contract import ExecutionContract


def validate(contract: "ExecutionContract") -> None:
    """Raises `BadContract` for a contract that contradicts itself; each check below says why it matters."""
    _one_owner_a_case(contract)
    _asymmetry_carries_a_gate(contract)
    _one_arch(contract)
    _sizes(contract)
    _claims_are_possible(contract)


def _one_owner_a_case(contract: "ExecutionContract") -> None:
    owners: dict[tuple[str, str], int] = {}
    for entry in contract.composition:
        for case in entry.cases:
            if case not in contract.cases:
                raise BadContract(
                    field=f"composition.{entry.region}.cases",
                    found=case,
                    allowed=", ".join(contract.cases),
                    reason="The entry owns a case that the contract does not cover.",
                )
            owners[entry.region, case] = owners.get((entry.region, case), 0) + 1
    for region in sorted({entry.region for entry in contract.composition}):
        for case in contract.cases:
            count = owners.get((region, case), 0)
            if count != 1:
                raise BadContract(
                    field=f"composition.{region}",
                    found=f"{count} owners in {case}",
                    allowed="exactly one owner in every case",
                    reason="Without an owner the bits are undeclared; with two they depend on which one runs.",
                )


def _asymmetry_carries_a_gate(contract: "ExecutionContract") -> None:
    by_region: dict[str, list[CompositionEntry]] = {}
    for entry in contract.composition:
        by_region.setdefault(entry.region, []).append(entry)
    for region, entries in by_region.items():
        if len(entries) == 1:
            continue
        arithmetic = [identity_fields(entry, "numerical_policy") | {"cases": None} for entry in entries]
        if any(fields in arithmetic[:index] for index, fields in enumerate(arithmetic)):
            raise BadContract(
                field=f"composition.{region}",
                found="two entries that differ only in their cases",
                allowed="one entry that lists all its cases",
                reason="One arithmetic written in two ways would have two identities.",
            )
        for entry in entries:
            if entry.gate is None:
                raise BadContract(
                    field=f"composition.{region}.gate",
                    found=f"none for {entry.impl_id} in {', '.join(entry.cases)}",
                    allowed="the name of the gate that compares the region's implementations",
                    reason="The region has different owners in different cases, and only a gate shows that they agree.",
                )


def _one_arch(contract: "ExecutionContract") -> None:
    archs = sorted({entry.arch for entry in contract.composition})
    if len(archs) != 1:
        raise BadContract(
            field="composition.arch",
            found=", ".join(archs),
            allowed="one architecture in all entries",
            reason="Bits of different architectures are never compared.",
        )
    for entry in contract.composition:
        if not entry.kernel_digests and not entry.arch.startswith("cpu-"):
            raise BadContract(
                field=f"composition.{entry.region}.kernel_digests",
                found="none",
                allowed=f"the SHA-256 of every sealed {entry.arch} kernel",
                reason="On a GPU a region is its sealed kernels; without their digests nothing pins the bits.",
            )
    if (contract.toolchain.kernel_manifest is None) != contract.arch.startswith("cpu-"):
        raise BadContract(
            field="toolchain.kernel_manifest",
            found=contract.toolchain.kernel_manifest,
            allowed="null on a CPU, the manifest's SHA-256 on a GPU",
            reason="The manifest says in which order, over which buffers and for which shapes the kernels run.",
        )


def _sizes(contract: "ExecutionContract") -> None:
    model, padded = contract.model, contract.semantics.padded_vocab_size
    if padded < model.vocab_size:
        raise BadContract(
            field="semantics.padded_vocab_size",
            found=padded,
            allowed=f"at least model.vocab_size, {model.vocab_size}",
            reason="Padding adds rows to the head; it never removes tokens.",
        )
    if model.num_heads % model.num_kv_heads:
        raise BadContract(
            field="model.num_kv_heads",
            found=model.num_kv_heads,
            allowed=f"a divisor of model.num_heads, {model.num_heads}",
            reason="Each KV head serves the same number of query heads.",
        )


def _claims_are_possible(contract: "ExecutionContract") -> None:
    if contract.claims.state == "proved" and not contract.claims.device_kinds:
        raise BadContract(
            field="claims.device_kinds",
            found="none",
            allowed="the kinds of device that the gates ran on",
            reason="A proof happened on some device; where no gate ran, the state is unproved.",
        )
    for claim in contract.claims.topology:
        for degree in claim.allowed:
            obstacle = why_uncuttable(contract.model, contract.semantics, claim.axis, degree)
            if obstacle:
                raise BadContract(
                    field=f"claims.topology.{claim.axis}",
                    found=degree,
                    allowed="degrees that the model can be cut into",
                    reason=f"The claim is about a mesh that cannot exist. {obstacle}",
                )
