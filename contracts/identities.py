"""The three identities: SHA-256 over the canonical bytes of the fields that belong to each."""

from collections.abc import Mapping
from typing import Annotated

from contracts.canonical import sha256_hex
from contracts.field_types import Sha256
from contracts.section import IDENTITIES, NO_IDENTITY, Section


class Identities(Section):
    """`semantic` and `numerical_policy` must be equal on both sides; `deployment` is logged."""

    semantic: Annotated[Sha256, NO_IDENTITY]
    """Which logical model."""
    numerical_policy: Annotated[Sha256, NO_IDENTITY]
    """Everything that can change a bit."""
    deployment: Annotated[Sha256, NO_IDENTITY]
    """The rest."""


def compute_identities(contract: Section) -> Identities:
    """The identities that follow from the contract's fields, whatever is stored in it."""
    return Identities(
        **{name: sha256_hex({"identity": name, "fields": identity_fields(contract, name)}) for name in IDENTITIES}
    )


def identity_fields(section: Section, identity: str) -> dict[str, object]:
    """The fields of a section, and of those inside it, that belong to one identity, as plain JSON values."""
    fields: dict[str, object] = {}
    for name, declared in section.declarations.items():
        value = getattr(section, name)
        if declared is not None:
            if identity in declared.identities:
                fields[name] = plain(value)
            continue
        inner = (
            [found for item in value if (found := identity_fields(item, identity))]
            if isinstance(value, tuple)
            else identity_fields(value, identity)
            if value is not None
            else None
        )
        # A section without a field in this identity leaves no trace in it.
        if inner:
            fields[name] = inner
    return fields


def plain(value: object) -> object:
    """A leaf's value as JSON: mappings to dicts, tuples to lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value
