"""The published JSON Schema of a contract. `python -m contracts.schema` writes it anew."""

import json
from pathlib import Path

from contracts.contract import ExecutionContract

SCHEMA_FILE = Path(__file__).with_name("execution_contract.schema.json")


def schema_text() -> str:
    """The JSON Schema (draft 2020-12); `x-identities` lists the identities that a field rotates."""
    schema = ExecutionContract.model_json_schema()
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
