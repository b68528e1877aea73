"""Ctrl-C reaches vLLM in a process of its own as well, which then answers nothing: nobody may wait for it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long_file(60)]


def test_ctrl_c_ends_a_rollout_beside_an_engine_that_it_ends_too(tmp_path):
    script = Path(__file__).with_name("interrupted_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "policy")],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("raised", "closed"))]
    assert said == ["raised KeyboardInterrupt", "closed"], done.stdout[-2000:] + done.stderr[-4000:]
