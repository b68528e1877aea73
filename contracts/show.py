"""A contract for a person: values in decimal, one line a region and one a mesh axis."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from contracts.claims import InvariantClaim, PinnedClaim
from contracts.composition import CompositionEntry
from contracts.float_bits import bits_float, is_float_bits
from contracts.frozen_map import FrozenMap
from contracts.section import Section

if TYPE_CHECKING:
    from contracts.contract import ExecutionContract


def format_contract(contract: "ExecutionContract") -> str:
    """The whole contract as text, in the order of its fields."""
    lines = [f"schema_version  {contract.schema_version}", f"cases  {format_value(contract.cases)}"]
    for name in ("model", "composition", "semantics", "claims", "toolchain", "deployment", "identities"):
        section = getattr(contract, name)
        if name == "composition":
            rows = [_owner_row(entry, contract.cases) for entry in section]
        else:
            rows = list(_rows(section)) if section is not None else [("not sealed", "")]
        width = max(len(label) for label, _ in rows)
        lines += ["", name, *(f"  {label:<{width}}  {value}".rstrip() for label, value in rows)]
    return "\n".join(lines)


def format_value(value: object) -> str:
    """A field's value: floats in decimal beside their bits, sets and mappings comma-separated."""
    if value is None:
        return "(none)"
    if is_float_bits(value):
        return f"{bits_float(str(value))!r} ({value})"
    if isinstance(value, FrozenMap):
        return ", ".join(f"{key}={format_value(item)}" for key, item in value.items()) or "(empty)"
    if isinstance(value, tuple):
        return ", ".join(format_value(item) for item in value) or "(empty)"
    return str(value) if value != "" else "(empty)"


def _rows(section: Section) -> Iterator[tuple[str, str]]:
    for name, declared in section.declarations.items():
        value = getattr(section, name)
        if declared is None:
            yield from (_axis_row(claim) for claim in value)
        else:
            yield name, format_value(value)


def _axis_row(claim: InvariantClaim | PinnedClaim) -> tuple[str, str]:
    kind = "invariant over" if claim.kind == "invariant" else "pinned to"
    return claim.axis, f"{kind} {format_value(claim.allowed)}; gate {claim.gate}"


def _owner_row(entry: CompositionEntry, cases: tuple[str, ...]) -> tuple[str, str]:
    where = "all cases" if entry.cases == cases else ", ".join(entry.cases)
    kernels = f"; {len(entry.kernel_digests)} sealed kernels" if entry.kernel_digests else ""
    return entry.region, (
        f"{entry.impl_id} version {entry.version} on {entry.arch} in {where}; "
        f"constants {format_value(entry.constants)}{kernels}; gate {format_value(entry.gate)}"
    )
