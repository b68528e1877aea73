"""The time that a kernel adds to a step or to prompts, where launches overlap."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from prefill_kernels import summary
from step_kernels import added, of_a_step

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


def test_what_no_step_launches_is_of_none():
    """The prompts' kernel took longer in the shorter run; one that came later was in the longer run alone."""
    few, many = (
        {"prompts": (36, 90.0), "step": (16, 160.0)},
        {"prompts": (36, 20.0), "step": (48, 512.0), "rare": (4, 8.0)},
    )
    assert of_a_step(few, many, 16) == [
        {"kernel": "step", "a_step": 2.0, "us_a_step": 22.0},
        {"kernel": "rare", "a_step": 0.25, "us_a_step": 0.5},
    ]
