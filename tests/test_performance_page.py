"""docs/performance.md is what its script makes of the committed result files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import performance


def test_an_arm_that_ended_early_has_no_row_on_the_page():
    found = {
        "policy": "qwen3_8b",
        "arms": {"stock": {"exit_code": 0, "rows": []}, "isojax": {"exit_code": -9, "rows": []}},
    }
    assert performance._by_workload(found, "stock") == {}
    with pytest.raises(ValueError, match="isojax of qwen3_8b ended early"):
        performance._by_workload(found, "isojax")


def test_the_page_is_made_from_the_committed_results():
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page()
    for title in ("## Matmul", "## Attention", "## Norms and elementwise", "## A decode step in vLLM"):
        assert title in performance.page()
