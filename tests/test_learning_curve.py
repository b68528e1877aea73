"""The comparison of two runs: its numbers are the runs' own, and docs/results.md is made of its file alone."""

import dataclasses
import json
import math
import statistics
import sys
import typing
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learning_curve
import learning_page

from contracts import FILE_NAME, save_contract
from isojax import Policy
from isojax.contract import build_contract
from isojax.evidence import small_policy
from isojax.rl.config_file import load_config
from isojax.rl.metrics import MetricsFile, StepMetrics
from isojax.rl.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
STEPS = 50


def _line(arm, step):
    """A step that learned nothing, except for what the comparison reads."""
    zeros = {int: 0, float: 0.0, str: "0"}
    values = {name: zeros.get(kind) for name, kind in typing.get_type_hints(StepMetrics).items()}
    values |= {"arm": arm, "step": step, "tokens": 100, "seconds_train": 1.5, "seconds_sync": 0.5}
    if arm == "exact":
        values |= {"reward_mean": 0.2 + 0.01 * step, "full_rows": 8}
    else:
        values |= {"reward_mean": 0.2 + 0.005 * step, "mismatch_tokens": 90, "mismatch_max_abs": step / 1000}
        values |= {"policy_kl": 0.25, "policy_kl_k1": -0.125, "clip_fraction": 0.5, "first_ratio_off_one": 80}
    return StepMetrics(**values)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for arm, name in (("exact", "smollm2_grpo"), ("native", "smollm2_grpo_native")):
        folder = RunFolder(root / arm)
        folder.policy.mkdir(parents=True)
        folder.write_config(load_config(ROOT / "examples" / f"{name}.toml"))
        metrics = MetricsFile(folder.metrics)
        for step in range(1, STEPS + 1):
            metrics.append(_line(arm, step))
    contract = build_contract(Policy(small_policy.CONFIG), tokenizer={})
    save_contract(contract, root / "exact" / "policy" / FILE_NAME)
    return root


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("docs")
    files = ["--out", str(out / "pictures"), "--results", str(out / "found.json"), "--page", str(out / "results.md")]
    learning_curve.main([str(runs / "exact"), str(runs / "native"), *files])
    return out


def test_the_numbers_are_those_of_the_runs(written):
    found = json.loads((written / "found.json").read_text())
    last = [0.2 + 0.01 * step for step in range(31, 51)]
    assert found["reward"]["exact"]["last"]["mean"] == pytest.approx(statistics.fmean(last))
    error = statistics.stdev(last) / math.sqrt(20)
    assert found["reward"]["exact"]["last"]["standard_error"] == pytest.approx(error)
    # The native arm's rewards scatter half as much.
    difference = statistics.fmean(last) - (0.2 + 0.005 * 40.5)
    distances = found["reward"]["standard_errors_apart"]
    assert distances["last, exact over native"] == pytest.approx(difference / math.hypot(error, error / 2))
    exact, native = found["arms"]["exact"], found["arms"]["native"]
    assert (exact["mismatch_tokens"], native["mismatch_tokens"]) == (0, 90 * STEPS)
    assert (exact["full_rows"], exact["full_row_mismatches"], native["full_rows"]) == (8 * STEPS, 0, 0)
    assert (native["policy_kl_mean"], native["policy_kl_k1_mean"]) == (0.25, -0.125)
    assert native["curves"]["clip_fraction"] == [0.5] * STEPS
    assert exact["seconds_step_median"] == 2.0
    assert found["examples"] == {
        "exact": "examples/smollm2_grpo.toml",
        "native": "examples/smollm2_grpo_native.toml",
    }


def test_page_and_pictures_are_made_of_the_file_alone(written, runs):
    found = json.loads((written / "found.json").read_text())
    text = (written / "results.md").read_text()
    assert text == learning_page.page(found)
    assert f"| of these, tokens that differ | 0 | {90 * STEPS:,} |" in text
    for name, content in learning_page.pictures(found).items():
        assert (written / "pictures" / name).read_text() == content
        assert f"(pictures/{name})" in text
    for arm, name in learning_page.METRICS.items():
        assert (written / name).read_text() == (runs / arm / "metrics.jsonl").read_text()
        assert f"`benchmarks/results/{name}`" in text
    found["arms"]["exact"]["mismatch_tokens"] = 1
    assert learning_page.page(found) != text


def test_runs_that_are_not_two_arms_of_one_are_refused(runs, tmp_path):
    exact, native = RunFolder(runs / "exact"), RunFolder(runs / "native")
    with pytest.raises(SystemExit, match="the exact run's metrics are of"):
        learning_curve.measured(native, exact)
    other = RunFolder(tmp_path)
    config = load_config(ROOT / "examples" / "smollm2_grpo_native.toml")
    other.write_config(config.model_copy(update={"seed": 1}))
    other.metrics.write_text(native.metrics.read_text())
    with pytest.raises(SystemExit, match="the runs differ in seed: 0 and 1"):
        learning_curve.measured(exact, other)
    MetricsFile(other.metrics).append(dataclasses.replace(_line("native", STEPS + 1)))
    with pytest.raises(SystemExit, match="both need the same number"):
        learning_curve.measured(exact, other)


def test_a_folder_that_is_no_runs_is_named(runs, tmp_path):
    with pytest.raises(SystemExit, match=r"absent/config\.json.*cannot be read"):
        learning_curve.main([str(tmp_path / "absent"), str(runs / "native")])
    with pytest.raises(SystemExit, match="native run's metrics are of no step"):
        learning_curve.main([str(runs / "exact"), str(_without_steps(tmp_path / "empty"))])


def _without_steps(folder):
    folder.mkdir()
    RunFolder(folder).write_config(load_config(ROOT / "examples" / "smollm2_grpo_native.toml"))
    return folder


def test_the_two_examples_differ_in_the_arm_and_its_check_alone():
    exact, native = (load_config(ROOT / "examples" / f"smollm2_grpo{end}.toml") for end in ("", "_native"))
    changed = exact.model_dump()
    changed["policy"]["arm"] = "native"
    changed["check"]["on_mismatch"] = "record"
    assert native.model_dump() == changed


def _require_page_of_its_run(results, page, pictures):
    """A page of results says what a committed file holds; without such a file there is no page and no picture."""
    if not results.exists():
        assert not page.exists()
        assert not pictures.exists()
        return
    found = json.loads(results.read_text())
    assert page.read_text() == learning_page.page(found)
    for name, content in learning_page.pictures(found).items():
        assert (pictures / name).read_text() == content


def test_the_committed_page_is_made_of_the_committed_run():
    _require_page_of_its_run(learning_curve.RESULTS, learning_curve.PAGE, learning_curve.PICTURES)


def test_a_page_without_its_file_or_unlike_it_is_seen(written, tmp_path):
    files = written / "found.json", written / "results.md", written / "pictures"
    _require_page_of_its_run(*files)
    with pytest.raises(AssertionError):
        _require_page_of_its_run(tmp_path / "none.json", *files[1:])
    other = tmp_path / "results.md"
    other.write_text(files[1].read_text().replace("0", "1", 1))
    with pytest.raises(AssertionError):
        _require_page_of_its_run(files[0], other, files[2])
