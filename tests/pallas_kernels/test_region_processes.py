"""Bits do not depend on the process, its number of threads, or how rows and weights are cut over devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import process_checks
import pytest
from region_samples import SAMPLES

pytestmark = pytest.mark.long_file(60)

FOLDER = Path(__file__).parent
# Each: script, environment, and the CPUs that the process may use. This process itself has as many threads as CPUs.
PROCESSES = {
    "one thread": ("process_checks.py", {"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}, {0}),
    "many threads": ("sharding_checks.py", {"NPROC": "8"}, None),
}


def start(script, environment, processors):
    # Each compiles for itself: with a shared cache the bits of one compilation would be compared with themselves.
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, str(FOLDER / script)],
        env={**own, "JAX_PLATFORMS": "cpu", **environment},
        preexec_fn=(lambda: os.sched_setaffinity(0, processors)) if processors else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def outputs():
    """The JSON that each script prints, in processes side by side."""
    running = {name: start(*settings) for name, settings in PROCESSES.items()}
    printed = {name: process.communicate() for name, process in running.items()}
    for name, process in running.items():
        assert process.returncode == 0, f"{name}: {printed[name][1][-2000:]}"
    return {name: json.loads(output.splitlines()[-1]) for name, (output, _) in printed.items()}


@pytest.fixture(scope="module")
def sharded(outputs):
    return outputs["many threads"]


def test_processes_with_one_thread_and_with_many_agree(outputs):
    assert outputs["one thread"] == outputs["many threads"]["digests"]


def test_this_process_agrees_with_them_and_another_schedule_does_not(outputs):
    wide = outputs["one thread"]["wide"]
    assert process_checks.digest(process_checks.wide_results(leaves=4)) == wide
    assert process_checks.digest(process_checks.wide_results(leaves=2)) != wide


@pytest.mark.parametrize("name", [sample.name for sample in SAMPLES])
def test_rows_over_eight_devices_equal_all_rows_on_one(sharded, name):
    assert sharded[f"rows {name}"] == 0


@pytest.mark.parametrize("ranks", [2, 8])
def test_columns_of_a_weight_over_ranks_equal_the_whole(sharded, ranks):
    assert sharded[f"columns {ranks}"] == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_leaves_of_the_depth_over_ranks_fold_to_the_whole(sharded, ranks):
    assert sharded[f"leaves {ranks}"] == 0


def test_adding_rounded_parts_by_psum_is_caught(sharded):
    assert sharded["psum of leaves"] > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_leaves_of_the_vocabulary_over_ranks_equal_the_whole(sharded, ranks):
    assert sharded[f"vocabulary {ranks}"] == 0


def test_heads_over_ranks_equal_all_heads(sharded):
    assert sharded["heads"] == 0


def test_a_replicated_weight_gets_its_whole_gradient(sharded):
    assert sharded["gradient"] < 1e-5
