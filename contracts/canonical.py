"""Canonical JSON bytes (RFC 8785) and their SHA-256."""

import hashlib
from collections.abc import Mapping

import rfc8785

from contracts.errors import BadContract


def canonical_bytes(value: object) -> bytes:
    """The one byte string of a JSON value, whatever the order of its keys (RFC 8785).

    Takes None, bool, int below 2**53 in size, str, and lists, tuples and mappings of them. Floats are refused: two
    floats that print alike can differ in a bit, so the contract stores bit patterns (`contracts.float_bits`).
    Raises `BadContract`.
    """
    return rfc8785.dumps(_plain(value, "value"))  # type: ignore[arg-type]


def sha256_hex(value: object) -> str:
    """SHA-256 of the canonical bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _integer(value, where)
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, Mapping):
        return {_text(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise BadContract(
        field=where,
        found=f"{value!r} of type {type(value).__name__}",
        allowed="null, true, false, integers, text, lists, objects",
        reason="Floats are stored as bit patterns (contracts.float_bits), so that equal text means equal bits.",
    )


def _integer(value: int, where: str) -> int:
    if abs(value) < 2**53:
        return value
    raise BadContract(
        field=where,
        found=value,
        allowed="integers between -(2**53 - 1) and 2**53 - 1",
        reason="JSON readers hold numbers as doubles, which have no exact form for this one.",
    )


def _text(value: object, where: str) -> str:
    if isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value):
        return value
    raise BadContract(
        field=where,
        found=ascii(value),
        allowed="text without lone surrogates, also as keys",
        reason="It has no UTF-8 form, so it has no canonical bytes.",
    )
