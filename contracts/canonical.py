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
    plain = _plain(value, "value")
    try:
        return rfc8785.dumps(plain)  # type: ignore[arg-type]
    except rfc8785.CanonicalizationError as error:
        raise BadContract(
            field="canonical JSON",
            found=f"{type(value).__name__}: {error}",
            allowed="integers between -(2**53 - 1) and 2**53 - 1 and text without lone surrogates",
            reason="RFC 8785 has no exact form for this value.",
        ) from error


def sha256_hex(value: object) -> str:
    """SHA-256 of the canonical bytes, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _plain(value: object, where: str) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise BadContract(
        field=where,
        found=f"{value!r} of type {type(value).__name__}",
        allowed="null, true, false, integers, text, lists, objects",
        reason="Floats are stored as bit patterns (contracts.float_bits), so that equal text means equal bits.",
    )


def _key(key: object, where: str) -> str:
    if isinstance(key, str):
        return key
    raise BadContract(field=where, found=f"key {key!r}", allowed="text keys", reason="JSON objects have text keys.")
