"""The whole engines' benchmark off a card: what it asks for, and how arms are compared."""

import io
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import engine
import engine_arm

from bridge.start import EngineOptions


def test_a_workload_is_read_from_its_text():
    assert engine_arm.Workload.parse("32x128x512") == (32, 128, 512)
    with pytest.raises(TypeError):
        engine_arm.Workload.parse("32x128")


def test_repeats_that_measure_nothing_are_refused_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--repeats", "0"])
    with pytest.raises(SystemExit):
        engine.main()
    assert "argument --repeats: 0 is less than 1" in capsys.readouterr().err


def test_our_arm_asks_for_options_that_the_engine_has():
    options = EngineOptions.of(engine_arm.our_settings(32, 640))
    assert (options.max_sequences, options.max_context) == (32, 640)


def test_an_arm_is_compared_with_stock_on_the_workloads_that_both_measured():
    def row(batch, seconds, **more):
        return {"batch": batch, "prompt": 128, "output": 512, "seconds": seconds, **more}

    arms = {
        "stock": {"exit_code": 0, "rows": [row(1, 2.0, device_ms_a_step=4.0), row(32, 8.0)]},
        "isojax": {"exit_code": 1, "rows": [row(1, 1.0, device_ms_a_step=3.0)]},
        "batch_invariant": {"exit_code": 0, "rows": [row(32, 12.0), row(256, 9.0)]},
    }
    assert engine.compared(arms)["ratios_to_stock"] == {
        "isojax": {"1x128x512": {"seconds": 0.5, "device_ms_a_step": 0.75}},
        "batch_invariant": {"32x128x512": {"seconds": 1.5}},
    }


def test_arms_start_together_and_measure_in_turn(tmp_path, monkeypatch):
    """With a stand-in for the engine: an arm that dies before it stands is no reason to wait."""
    script = tmp_path / "engine_arm.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "if sys.argv[1] == 'batch_invariant':\n    sys.exit(3)\n"
        "out = pathlib.Path(sys.argv[-1])\nout.write_text('[]')\nassert sys.stdin.readline()\n"
        "start = time.monotonic()\ntime.sleep(0.2)\nout.write_text(str([start, time.monotonic()]))\n"
    )
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    arms = [engine.Arm.start(name, tmp_path, []) for name in ("stock", "isojax", "batch_invariant")]
    for arm in arms:
        arm.wait_until_it_stands()
    found = [arm.measured() for arm in arms]
    assert [arm["exit_code"] for arm in found] == [0, 0, 3]
    assert found[0]["rows"][1] <= found[1]["rows"][0]
    assert found[2]["rows"] == []


def test_stock_vllm_is_asked_for_a_log_probability_of_every_token():
    """With a stand-in for vLLM's class; a missing value shortens what counts as a completion."""
    asked = []

    class Llm:
        def generate(self, prompts, wanted, use_tqdm):
            asked.append(wanted)
            found = SimpleNamespace(token_ids=[1] * wanted.max_tokens, logprobs=[{}] * (wanted.max_tokens - 1))
            return [SimpleNamespace(outputs=[found]) for _ in prompts]

    with pytest.raises(RuntimeError, match=r"completions of \{4\} tokens where 5 were asked for"):
        engine_arm._seconds(partial(engine_arm._generated, Llm()), engine_arm.Workload(2, 3, 5), 0)
    assert (asked[0].logprobs, asked[0].max_tokens) == (0, 5)


def test_an_arm_whose_benchmark_is_gone_does_not_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_arm, "_started", lambda *given: nullcontext())
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    # What it sets for its own process is taken back from this one.
    for name in (
        "VLLM_PLUGINS",
        "VLLM_NO_USAGE_STATS",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    ):
        monkeypatch.setenv(name, "0")
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["", "stock", str(tmp_path), "--workload", "1x8x8", "--out", str(out)])
    with pytest.raises(SystemExit, match="nobody is left"):
        engine_arm.main()
    assert out.read_text() == "[]"
