"""Contracts on disk: `execution_contract.json`, canonical bytes, read strictly."""

import json
from pathlib import Path

from pydantic import ValidationError

from contracts.contract import ExecutionContract
from contracts.errors import BadContract

FILE_NAME = "execution_contract.json"


def save_contract(contract: ExecutionContract, path: str | Path) -> Path:
    """Write the canonical bytes to a file, or to `execution_contract.json` in a folder; returns the file's path.

    Raises `IdentityMismatch` for a contract that is not sealed.
    """
    contract.validate_identities()
    file = _file(path)
    file.write_bytes(contract.canonical_bytes())
    return file


def load_contract(path: str | Path) -> ExecutionContract:
    """Read a contract from a file, or from `execution_contract.json` in a folder, and validate all of it.

    Raises `BadContract` for a file that is missing, malformed, incomplete or inconsistent, and `IdentityMismatch` for
    one whose stored identities are not those of its fields.
    """
    file = _file(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise BadContract(
            field="contract file",
            found=f"{file}: {error.strerror}",
            allowed=f"a readable file or a folder with {FILE_NAME}",
            reason="Without its contract a policy is not run.",
        ) from error
    contract = parse_contract(content, where=str(file))
    contract.validate_identities()
    return contract


def parse_contract(content: bytes | str, where: str = "contract") -> ExecutionContract:
    """A contract from JSON text. Refuses double keys, floats and NaN, which JSON readers silently accept."""
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        data = json.loads(text, object_pairs_hook=_no_double_keys, parse_float=_no_number, parse_constant=_no_number)
    except ValueError as error:
        raise BadContract(
            field=where, found=f"text that is not JSON: {error}", allowed="UTF-8 JSON", reason="The file is damaged."
        ) from error
    except RecursionError as error:
        raise BadContract(
            field=where, found="JSON nested too deeply", allowed="a contract", reason="The file is damaged."
        ) from error
    try:
        return ExecutionContract.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, where) from error


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


def _no_double_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise BadContract(
                field=key,
                found="the key twice in one object",
                allowed="once",
                reason="Readers differ in which they take.",
            )
    return dict(pairs)


def _no_number(text: str) -> object:
    raise BadContract(
        field="number",
        found=text,
        allowed="integers, and floats as f64: bit patterns",
        reason="A float written in decimal may not come back as the same bits.",
    )


def _refusal(error: ValidationError, where: str) -> BadContract:
    """The first of pydantic's complaints as a refusal, and how many more there are."""
    problems = error.errors(include_url=False)
    first = problems[0]
    more = f" {len(problems) - 1} more problems in the file." if len(problems) > 1 else ""
    if first["type"] == "missing":
        found, allowed = "nothing", "a value; no field of a contract has a silent default"
    elif first["type"] == "extra_forbidden":
        found, allowed = f"an unknown field with value {first['input']!r}", "the fields of docs/contract.md"
    else:
        found, allowed = repr(first["input"]), str(first["msg"])
    return BadContract(
        field=".".join(map(str, first["loc"])) or "contract",
        found=found if len(found) < 200 else f"{found[:200]}...",
        allowed=allowed,
        reason=f"{where} is not an execution contract.{more}",
    )
