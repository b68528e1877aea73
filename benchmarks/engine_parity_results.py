"""The files of the comparison: one a policy, filled by as many calls as it takes, and one over all policies."""

from __future__ import annotations

import json
import os
import shlex
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

SUMS = ("tokens", "token_mismatches", "rows", "row_mismatches", "histories")


class Results:
    """One policy's file. A case that is measured again replaces itself; cases of other calls stay."""

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        """identity: what must be equal for two calls to be about the same thing: kernels, weights, card.

        Raises ValueError where the file is about something else.
        """
        self._path = path
        self.content: dict[str, Any] = {"identity": identity, "calls": [], "cases": {}, "facts": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["identity"] != identity:
                raise ValueError(f"{path} is about {self.content['identity']}, not {identity}; name another file")
        self.content["calls"].append(
            {
                "date": date.today().isoformat(),
                "command": shlex.join(sys.argv),
                "versions": {name: version(name) for name in ("jax", "torch", "vllm")},
            }
        )

    def add(self, name: str, case: dict[str, Any]) -> None:
        """Takes a case and writes the file, so that a run that is cut short leaves what it found."""
        self.content["cases"][name] = case
        self._write()

    def note(self, name: str, value: Any) -> None:
        """Takes a fact about the run, such as seconds, and writes the file."""
        self.content["facts"][name] = value
        self._write()

    def _write(self) -> None:
        self.content["totals"] = totals(self.content["cases"])
        partial = self._path.with_name(f"{self._path.name}.partial")
        partial.write_text(json.dumps(self.content, indent=2) + "\n")
        os.replace(partial, self._path)


def totals(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums over cases, the rows' mean entropy in nats, failed cases, and whether all of it was exact."""
    found: dict[str, Any] = {name: sum(case.get(name, 0) for case in cases.values()) for name in SUMS}
    entropy = sum(case.get("entropy_sum", 0.0) for case in cases.values())
    found["mean_token_entropy"] = entropy / found["rows"] if found["rows"] else None
    found["max_abs"] = max((case.get("max_abs", 0.0) for case in cases.values()), default=0.0)
    found["failed_cases"] = sorted(name for name, case in cases.items() if "error" in case)
    found["inexact_cases"] = sorted(name for name, case in cases.items() if case.get("exact") is False)
    found["exact"] = bool(found["tokens"] and not found["failed_cases"] and not found["inexact_cases"])
    return found


def summary(paths: list[Path]) -> dict[str, Any]:
    """All policies together: each one's totals, their sums and the verdict."""
    policies = {path.stem: json.loads(path.read_text())["totals"] for path in paths}
    sums = {name: sum(policy[name] for policy in policies.values()) for name in SUMS}
    return {
        "policies": policies,
        "totals": sums,
        "exact": bool(policies) and all(policy["exact"] for policy in policies.values()),
    }
