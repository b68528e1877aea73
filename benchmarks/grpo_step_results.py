"""The result file of `grpo_step.py`: both arms' steps, medians with their spread, and the ratios of the medians."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ARMS = ("exact", "native")
PARTS = ("rollout", "check", "train", "sync")
SECONDS = ("seconds_step", *(f"seconds_{part}" for part in PARTS))
RATES = ("tokens_per_second", "tokens_per_second_rollout", "tokens_per_second_train")
WHAT = (
    "Synchronous GRPO steps from random weights that nothing stops: every completion has the same number of tokens, so "
    "both arms have equal work. The comparison with trainer_score is part of a step, and the native arm makes it as "
    "well, to count what differs. tokens_per_second: sampled tokens over the seconds of a whole step."
)


class Results:
    """The file, read and written anew at every change, so that processes of different arms can add to it in turn."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What is there; nothing before the first change. Raises SystemExit for what is no file of this benchmark."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        except (OSError, ValueError) as error:
            raise SystemExit(f"{self.path} cannot be read as JSON: {error}; name another file.") from None
        if found and not (isinstance(found, dict) and "workload" in found):
            raise SystemExit(f"{self.path} holds no result of this benchmark; name another file.")
        return found

    def start(self, workload: Mapping[str, Any], command: str, arms: Sequence[str]) -> None:
        """Head of the file, without earlier results of these arms.

        Raises SystemExit where it holds another workload, whose arms would not compare.
        """
        content = self.read()
        if content.get("workload", workload) != workload:
            raise SystemExit(f"{self.path} holds another workload, {content['workload']}; name another file.")
        commands = [*content.get("commands", []), command]
        head = {"what": WHAT, "date": datetime.date.today().isoformat(), "commands": commands, "workload": workload}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {arm: found for arm, found in content.get("arms", {}).items() if arm not in arms}
        self._write({**content, **head, "arms": kept, "exact_over_native": {}})

    def record_arm(self, arm: str, found: Mapping[str, Any]) -> None:
        """Puts an arm's measurements, which may be unfinished, in place of those that it had so far.

        found: `steps`, one mapping a counted step with `SECONDS` and tokens, and anything else.
        """
        content = self.read()
        steps = found.get("steps", [])
        summary = {name: spread([step[name] for step in steps]) for name in (*SECONDS, *RATES)} if steps else {}
        arms = content.get("arms", {}) | {arm: {**found, "medians": summary}}
        self._write({**content, "arms": arms, "exact_over_native": ratios(arms)})

    def record_failure(self, arm: str, problem: str) -> None:
        """Writes down why an arm ended early, beside what it had measured."""
        found = self.read().get("arms", {}).get(arm, {})
        self.record_arm(arm, {"failed": problem, **found})

    def _write(self, content: Mapping[str, Any]) -> None:
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratios(arms: Mapping[str, Any]) -> dict[str, float]:
    """Exact over native of every median in seconds, and of the sync by itself; empty before both arms were measured."""
    if not all(arms.get(arm, {}).get("medians") for arm in ARMS):
        return {}
    exact, native = (arms[arm] for arm in ARMS)
    found = {name: exact["medians"][name]["median"] / native["medians"][name]["median"] for name in SECONDS}
    if all("sync_ms" in arm for arm in (exact, native)):
        found["sync_ms"] = exact["sync_ms"]["median"] / native["sync_ms"]["median"]
    return found
