"""The published JSON Schema of a contract. `python -m contracts.schema` writes it anew."""

import json
from pathlib import Path
from typing import Any

from contracts.contract import ExecutionContract

SCHEMA_FILE = Path(__file__).with_name("execution_contract.schema.json")


def schema_text() -> str:
    """The JSON Schema (draft 2020-12); `x-identities` lists the identities that a field rotates."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | ExecutionContract.model_json_schema()
    return json.dumps(_without_titles(schema), indent=2, sort_keys=True) + "\n"


def _without_titles(node: Any) -> Any:
    """Pydantic's generated titles say nothing new and change with its version."""
    if isinstance(node, dict):
        return {
            key: _without_titles(value)
            for key, value in node.items()
            if not (key == "title" and isinstance(value, str))
        }
    return [_without_titles(item) for item in node] if isinstance(node, list) else node


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
