"""The differences of two contracts, field by field, with the identities that each one rotates."""

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.canonical import canonical_bytes
from contracts.claims import InvariantClaim, PinnedClaim
from contracts.composition import CompositionEntry
from contracts.contract import ExecutionContract
from contracts.frozen_map import FrozenMap
from contracts.identities import plain
from contracts.section import IDENTITIES, Section
from contracts.show import format_value


@dataclass(frozen=True)
class Difference:
    """One field in which two contracts differ. None stands for a field that one side lacks."""

    field: str
    left: object
    right: object
    rotates: tuple[str, ...]


@dataclass(frozen=True)
class _Leaf:
    value: object
    rotates: tuple[str, ...]


def diff(left: ExecutionContract, right: ExecutionContract) -> list[Difference]:
    """All differences, in the order of the contract's fields; empty if and only if the contracts say the same.

    The identities themselves are left out, because they follow from the rest. A composition entry is compared case by
    case, so moving one case to another implementation shows as that, whatever entries the two contracts group it in.
    """
    differences: list[Difference] = []
    for name in ExecutionContract.model_fields:
        if name == "composition":
            differences += _composition_differences(left, right)
        elif name != "identities":
            ours, theirs = dict(_leaves(left, name)), dict(_leaves(right, name))
            differences += [Difference(*found) for found in _compare(ours, theirs)]
    return differences


def format_diff(differences: list[Difference]) -> str:
    """The differences for a person: each field with both values, then what becomes of each identity."""
    if not differences:
        return "The contracts are equal."
    lines: list[str] = []
    for item in differences:
        rotates = ", ".join(item.rotates) or "nothing"
        lines += [
            item.field,
            f"  left     {format_value(item.left)}",
            f"  right    {format_value(item.right)}",
            f"  rotates  {rotates}",
            "",
        ]
    rotated = {name for item in differences for name in item.rotates}
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}."
    return "\n".join(
        [*lines, count, *(f"{name}: {'rotates' if name in rotated else 'unchanged'}" for name in IDENTITIES)]
    )


def _compare(ours: dict[str, _Leaf], theirs: dict[str, _Leaf]) -> Iterator[tuple[str, object, object, tuple[str, ...]]]:
    missing = _Leaf(None, ())
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        left, right = ours.get(path, missing), theirs.get(path, missing)
        # Canonical bytes, because Python holds True and 1 for equal.
        if canonical_bytes(plain(left.value)) != canonical_bytes(plain(right.value)):
            yield path, left.value, right.value, left.rotates or right.rotates


def _leaves(section: Section, name: str, prefix: str = "") -> Iterator[tuple[str, _Leaf]]:
    value, declared, path = getattr(section, name), section.declarations[name], f"{prefix}{name}"
    if declared is None:
        for item in value if isinstance(value, tuple) else (value,):
            key = f"{path}.{item.axis}." if isinstance(item, InvariantClaim | PinnedClaim) else f"{path}."
            for inner in type(item).model_fields:
                yield from _leaves(item, inner, key)
    elif isinstance(value, FrozenMap):
        for key, item in value.items():
            yield f"{path}.{key}", _Leaf(item, declared.identities)
    else:
        yield path, _Leaf(value, declared.identities)


def _composition_differences(left: ExecutionContract, right: ExecutionContract) -> list[Difference]:
    common = [case for case in left.cases if case in right.cases]
    regions = sorted({entry.region for entry in (*left.composition, *right.composition)})
    differences: list[Difference] = []
    for region in regions:
        # Fields that differ alike in several cases are one difference.
        found: dict[tuple[str, object, object, tuple[str, ...]], list[str]] = {}
        for case in common:
            for item in _compare(_owner_leaves(left, region, case), _owner_leaves(right, region, case)):
                found.setdefault(item, []).append(case)
        for (name, ours, theirs, rotates), cases in found.items():
            where = "" if cases == common else f"[{', '.join(cases)}]"
            differences.append(Difference(f"composition.{region}{where}{name}", ours, theirs, rotates))
    return differences


def _owner_leaves(contract: ExecutionContract, region: str, case: str) -> dict[str, _Leaf]:
    owner = next((entry for entry in contract.composition if entry.region == region and case in entry.cases), None)
    if owner is None:
        return {}
    names = [name for name in CompositionEntry.model_fields if name not in ("region", "cases")]
    return {f".{path}": leaf for name in names for path, leaf in _leaves(owner, name)}
