"""What exactness does to learning: python benchmarks/learning_curve.py RUN_EXACT RUN_NATIVE --out docs/pictures.

Takes two run folders of `isojax train`, of which it reads metrics.jsonl, config.json and, of the exact one,
policy/execution_contract.json. Writes the numbers of both, and from these alone the pictures and docs/results.md, and
copies both runs' metrics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from learning_page import ARMS, METRICS, page, pictures

from contracts import load_contract
from contracts.errors import BadConfig, IsojaxError
from contracts.user_files import read_json_object
from isojax.rl.config_file import load_config, parse_config
from isojax.rl.metrics import read_metrics
from isojax.rl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning_curve_h200.json"
PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "pictures"
STEPS = 20
"""Of the beginning and of the end of a run, over which rewards are averaged."""
CURVES = ("reward_mean", "mismatch_tokens", "policy_kl", "policy_kl_k1", "clip_fraction", "first_clip_fraction")
TOTALS = ("tokens", "mismatch_tokens", "full_rows", "full_row_mismatches", "first_ratio_off_one")
MAY_DIFFER = {"policy": {"arm"}, "check": {"on_mismatch", "full_rows"}}


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line and writes everything."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exact", type=Path, metavar="RUN_EXACT", help="a run's folder")
    parser.add_argument("native", type=Path, metavar="RUN_NATIVE", help="the same run of the native arm")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    try:
        found = measured(RunFolder(options.exact), RunFolder(options.native))
    except IsojaxError as error:
        raise SystemExit(str(error)) from None
    found["command"] = "python benchmarks/learning_curve.py " + " ".join(arguments)
    for folder in (options.out, options.results.parent, options.page.parent):
        folder.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for arm, run in zip(ARMS, (options.exact, options.native), strict=True):
        shutil.copyfile(RunFolder(run).metrics, options.results.with_name(METRICS[arm]))
    for name, text in pictures(found).items():
        (options.out / name).write_text(text, encoding="utf-8")
    where = Path(os.path.relpath(options.out, options.page.parent)).as_posix()
    options.page.write_text(page(found, where), encoding="utf-8")
    print(json.dumps(found["reward"], indent=1), f"\nwritten: {options.results}, {options.page}, {options.out}")


def measured(exact: RunFolder, native: RunFolder) -> dict[str, Any]:
    """All numbers of the comparison. Raises SystemExit for runs that are not the two arms of one, equally long, and
    IsojaxError for a folder that is no run's."""
    folders = dict(zip(ARMS, (exact, native), strict=True))
    lines = {arm: read_metrics(folder.metrics) for arm, folder in folders.items()}
    config, other = (read_json_object(folder.config, refusal=BadConfig) for folder in folders.values())
    _require_comparable(lines, config, other)
    part = min(STEPS, len(lines["exact"]) // 2)
    rewards = {arm: [line["reward_mean"] for line in found] for arm, found in lines.items()}
    ends = {arm: {"first": mean(values[:part]), "last": mean(values[-part:])} for arm, values in rewards.items()}
    contract = load_contract(exact.policy)
    return {
        "date": datetime.date.today().isoformat(),
        "devices": sorted(contract.claims.device_kinds),
        "toolchain": {name: getattr(contract.toolchain, name) for name in ("jax", "jaxlib", "ptxas", "engine_runner")},
        "examples": {arm: example_of(folder) for arm, folder in folders.items()},
        "config": config,
        "steps": len(lines["exact"]),
        "steps_averaged": part,
        "reward": {
            **ends,
            # Of the later or native one over the earlier or exact one.
            "standard_errors_apart": {
                "exact, last over first": apart(ends["exact"]["last"], ends["exact"]["first"]),
                "native, last over first": apart(ends["native"]["last"], ends["native"]["first"]),
                "first, exact over native": apart(ends["exact"]["first"], ends["native"]["first"]),
                "last, exact over native": apart(ends["exact"]["last"], ends["native"]["last"]),
            },
        },
        "arms": {arm: _arm(found) for arm, found in lines.items()},
    }


def _arm(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [sum(value for name, value in line.items() if name.startswith("seconds_")) for line in lines]
    return {
        **{name: sum(line[name] for line in lines) for name in TOTALS},
        "mismatch_max_abs": max(line["mismatch_max_abs"] for line in lines),
        "policy_kl_mean": statistics.fmean(line["policy_kl"] for line in lines),
        "policy_kl_k1_mean": statistics.fmean(line["policy_kl_k1"] for line in lines),
        "clip_fraction_mean": statistics.fmean(line["clip_fraction"] for line in lines),
        "seconds_step_median": statistics.median(seconds),
        "curves": {name: [line[name] for line in lines] for name in CURVES},
    }


def mean(values: Sequence[float]) -> dict[str, float]:
    """Mean of some steps' mean rewards, and its standard error from their scatter."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"mean": statistics.fmean(values), "standard_error": error}


def apart(one: dict[str, float], other: dict[str, float]) -> float | None:
    """One mean over another, in standard errors of their difference; None where neither scatters."""
    error = math.hypot(one["standard_error"], other["standard_error"])
    return (one["mean"] - other["mean"]) / error if error else None


def example_of(folder: RunFolder) -> str | None:
    """The committed example whose configuration the run has in every key, or None."""
    config = parse_config(read_json_object(folder.config, refusal=BadConfig), source=str(folder.config))
    paths = sorted((ROOT / "examples").glob("*.toml"))
    return next((path.relative_to(ROOT).as_posix() for path in paths if load_config(path) == config), None)


def _require_comparable(lines: dict[str, list[dict[str, Any]]], exact: Any, native: Any) -> None:
    for arm, found in lines.items():
        arms = {line["arm"] for line in found}
        if arms != {arm}:
            raise SystemExit(f"the {arm} run's metrics are of {sorted(arms) or 'no step'}")
    counts = {arm: len(found) for arm, found in lines.items()}
    if len(set(counts.values())) > 1 or counts["exact"] < 4:
        raise SystemExit(f"runs of {counts} steps; both need the same number, 4 or more")
    for section in sorted(exact.keys() | native.keys()):
        before, now = exact.get(section), native.get(section)
        if isinstance(before, dict) and isinstance(now, dict):
            allowed = MAY_DIFFER.get(section, set())
            before, now = ({key: item for key, item in one.items() if key not in allowed} for one in (before, now))
        if before != now:
            raise SystemExit(f"the runs differ in {section}: {before} and {now}")


if __name__ == "__main__":
    main()
