"""The time that a kernel adds to a step or to prompts, where launches overlap."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from prefill_kernels import summary
from step_kernels import added

CHAINED = [(0.0, 10.0, "first"), (1.0, 14.0, "waits"), (2.0, 9.0, "inside"), (20.0, 25.0, "first")]


@pytest.mark.parametrize("order", [CHAINED, CHAINED[::-1]])
def test_a_kernel_that_waits_for_an_earlier_one_adds_what_it_takes_after_it(order):
    found = added(order)
    assert found == {"first": (2, 15.0), "waits": (1, 4.0), "inside": (1, 0.0)}
    # All that is added is what the device was busy.
    assert sum(us for _, us in found.values()) == 14.0 + 5.0


@pytest.mark.parametrize("order", [CHAINED, CHAINED[::-1]])
def test_a_card_is_idle_where_nothing_that_started_runs(order):
    found = summary(order)
    assert (found["span_us"], found["idle_us"]) == (25.0, 6.0)
    assert [row["kernel"] for row in found["kernels"]] == ["first", "waits", "inside"]
    assert found["kernels"][0] == {"kernel": "first", "launches": 2, "us": 15.0}
