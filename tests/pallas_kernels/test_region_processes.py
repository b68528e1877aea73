"""Bits do not depend on the process, its number of threads, or how rows and weights are cut over devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from region_samples import SAMPLES

FOLDER = Path(__file__).parent
# Each: environment, and the CPUs that the process may use.
THREADS = {
    "one thread": ({"NPROC": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}, {0}),
    "two threads": ({"NPROC": "2"}, None),
    "many threads": ({"NPROC": "16"}, None),
}


def run(script, environment, processors=None):
    """The JSON that a script prints in a new process."""
    process = subprocess.run(
        [sys.executable, str(FOLDER / script)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        preexec_fn=(lambda: os.sched_setaffinity(0, processors)) if processors else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def digests():
    return {name: run("process_checks.py", *settings) for name, settings in THREADS.items()}


@pytest.fixture(scope="module")
def sharded():
    return run("sharding_checks.py", {})


def test_processes_with_one_two_and_many_threads_agree(digests):
    assert digests["one thread"] == digests["two threads"] == digests["many threads"]
    assert digests["one thread"]["wide"] != digests["one thread"]["wide, two leaves"]


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
