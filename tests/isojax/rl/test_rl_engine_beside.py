"""Real vLLM in a process of its own: it samples the next rollout while the trainer learns, and both end at Ctrl-C."""

import subprocess
import sys
from pathlib import Path

import pytest

from isojax.rl.metrics import read_metrics
from isojax.rl.run_folder import RunFolder

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long_file(70)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def done(scratch):
    """One engine for both, since it takes half a minute of CPU time to start."""
    script = Path(__file__).with_name("engine_beside_run.py")
    return subprocess.run(
        [sys.executable, str(script), str(scratch)],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _said(done, *words):
    return [line for line in done.stdout.splitlines() if line.startswith(words)]


def test_a_lagged_run_beside_real_vllm_agrees_in_every_bit(done, scratch):
    assert _said(done, "beside") == ["beside True"], done.stdout[-2000:] + done.stderr[-4000:]
    lines = read_metrics(RunFolder(scratch / "run").metrics)
    assert [line["version_lag"] for line in lines] == [0, 1], done.stderr[-4000:]
    assert all(line["tokens"] == 24 and line["full_rows"] >= 5 for line in lines)
    assert sum(line["mismatch_tokens"] + line["full_row_mismatches"] for line in lines) == 0
    assert len({line["weight_digest"] for line in lines}) == 2


def test_ctrl_c_ends_a_rollout_beside_an_engine_that_it_ends_too(done):
    """It reaches vLLM in its own process as well, which then answers nothing: nobody may wait for it."""
    assert _said(done, "raised", "closed") == ["raised KeyboardInterrupt in a rollout", "closed"], (
        done.stdout[-2000:] + done.stderr[-4000:]
    )
