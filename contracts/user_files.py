"""Files that a user hands over, read strictly: bytes, text, JSON and JSON lines. Every mistake is a refusal."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contracts.errors import Refusal


def read_bytes(path: Path, *, refusal: type[Refusal], allowed: str, field: str | None = None) -> bytes:
    """The bytes of a file; raises `refusal` where it is missing, a folder or unreadable. field: the file's by default.

    allowed: what the file should have been, for the message.
    """
    try:
        return path.read_bytes()
    # ValueError: a path with a null character.
    except (OSError, ValueError) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise refusal(field=field or str(path), found=found, allowed=allowed, reason="It cannot be read.") from error


def read_text(path: Path, *, refusal: type[Refusal], allowed: str, field: str | None = None) -> str:
    """The UTF-8 text of a file; raises `refusal` as `read_bytes` does, and for another encoding."""
    content = read_bytes(path, refusal=refusal, allowed=allowed, field=field)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refusal(
            field=field or str(path), found=f"{path}: {error}", allowed=allowed, reason="It is not UTF-8 text."
        ) from error


def parse_json(content: bytes | str, *, where: str, refusal: type[Refusal], decimals: bool = True) -> Any:
    """The value of JSON text. `where` names the text in messages.

    Raises `refusal` for text that is not UTF-8 or not JSON, for a key twice in one object, and for nesting that is too
    deep. decimals: whether numbers with a fraction, NaN and infinities are taken.
    """

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise refusal(
                field=f"{where}, key {Counter(key for key, _ in pairs).most_common(1)[0][0]}",
                found="the key twice in one object",
                allowed="once",
                reason="Readers differ in which they take.",
            )
        return values

    def no_decimal(text: str) -> Any:
        raise refusal(
            field=f"{where}, number",
            found=text,
            allowed="integers, and floats as f64: bit patterns",
            reason="A float written in decimal may not come back as the same bits.",
        )

    strict: dict[str, Any] = {} if decimals else {"parse_float": no_decimal, "parse_constant": no_decimal}
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        return json.loads(text, object_pairs_hook=object_of, **strict)
    except (ValueError, RecursionError) as error:
        found = "JSON nested too deeply" if isinstance(error, RecursionError) else f"text that is not JSON: {error}"
        raise refusal(field=where, found=found, allowed="UTF-8 JSON", reason="It is damaged.") from error


def parse_json_object(content: bytes | str, *, where: str, refusal: type[Refusal]) -> dict[str, Any]:
    """As `parse_json`, for text that must hold an object."""
    value = parse_json(content, where=where, refusal=refusal)
    if not isinstance(value, dict):
        raise refusal(
            field=where, found=repr(value)[:80], allowed="a JSON object", reason="Its values are found by their keys."
        )
    return value


def read_json_object(path: Path, *, refusal: type[Refusal], allowed: str = "a JSON object") -> dict[str, Any]:
    """The JSON object in a file; raises `refusal` as `read_bytes` and `parse_json` do."""
    content = read_bytes(path, refusal=refusal, allowed=allowed)
    return parse_json_object(content, where=str(path), refusal=refusal)


def read_json_lines(
    path: Path, *, refusal: type[Refusal], field: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object of a JSONL file, with the file's name and line number for messages; empty lines are skipped."""
    text = read_text(path, refusal=refusal, allowed="a readable JSONL file", field=field)
    # Not splitlines: a string in JSON may hold U+2028 and other characters that it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json_object(line, where=where, refusal=refusal)
