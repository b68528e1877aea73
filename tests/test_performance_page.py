"""docs/performance.md is what its script makes of the committed result files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import performance


def test_the_page_is_made_from_the_committed_results():
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page()
    for title in ("## Matmul", "## Attention", "## Norms and elementwise", "## A decode step in vLLM"):
        assert title in performance.page()
