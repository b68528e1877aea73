"""The training benchmarks off a card: both arms run, agree, and are compared."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import attention_backward
import train_step


@pytest.mark.slow
def test_both_arms_of_a_step_are_timed_and_agree(tmp_path):
    out = tmp_path / "step.json"
    sizes = ["--shapes", "small", "--layers", "1", "--sequences", "2", "--length", "16"]
    train_step.main([str(out), *sizes, "--rounds", "2"])
    rows = json.loads(out.read_text())["rows"]
    timed = [row for row in rows if "ms" in row]
    assert [(row["what"], row["arm"]) for row in timed] == [
        (what, arm) for what in ("forward", "forward and backward") for arm in ("exact", "the trainer's native arm")
    ]
    assert all("exact_over_this" in row for row in timed if row["arm"] != "exact")
    distances = [row for row in rows if row["what"].startswith("distance")]
    assert len(distances) == 1
    for distance in distances:
        errors = [value for key, value in distance.items() if key not in ("what", "arm")]
        assert len(errors) == 12
        assert max(errors) < 0.1


def test_a_form_that_fails_is_a_row_and_the_others_are_timed(tmp_path):
    out = tmp_path / "attention.json"
    sizes = [
        "--heads",
        "2",
        "--key-heads",
        "1",
        "--sequences",
        "2",
        "--length",
        "16",
        "--head-size",
        "16",
        "--rounds",
        "1",
    ]
    attention_backward.main([str(out), *sizes, "--forms", "chunked", "cudnn, forward and"])
    failed, timed = json.loads(out.read_text())["rows"]
    assert failed["form"] == "cudnn, forward and backward"
    assert "failed" in failed
    assert timed["form"] == "chunked"
    assert timed["relative_errors"] == [0, 0, 0]
