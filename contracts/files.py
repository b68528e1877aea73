"""Contracts on disk: `execution_contract.json`, canonical bytes, read strictly."""

from pathlib import Path

from pydantic import ValidationError

from contracts.contract import ExecutionContract
from contracts.errors import BadContract
from contracts.user_files import parse_json, read_bytes

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
    content = read_bytes(
        file, refusal=BadContract, allowed=f"a readable file or a folder with {FILE_NAME}", field="contract file"
    )
    contract = parse_contract(content, where=str(file))
    contract.validate_identities()
    return contract


def parse_contract(content: bytes | str, where: str = "contract") -> ExecutionContract:
    """A contract from JSON text. Refuses double keys, floats and NaN, which JSON readers silently accept."""
    data = parse_json(content, where=where, refusal=BadContract, decimals=False)
    try:
        return ExecutionContract.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, where) from error


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path / FILE_NAME if path.is_dir() else path


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
