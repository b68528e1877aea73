"""The whole engines' benchmark off a card: what it asks for, and how arms are compared."""

import dataclasses
import io
import itertools
import json
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
        return {"batch": batch, "prompt": 128, "output": 512, "runs": 3, "seconds": seconds, **more}

    arms = {
        "stock": {"exit_code": 0, "rows": [row(1, 2.0, device_ms_a_step=4.0), row(32, 8.0)]},
        "isojax": {"exit_code": 1, "rows": [row(1, 1.0, device_ms_a_step=3.0)]},
        "batch_invariant": {"exit_code": 0, "rows": [row(32, 12.0), row(256, 9.0)]},
        "isojax_llm": {"exit_code": 1, "rows": [row(1, 1.0, runs=3), row(32, 4.0, runs=1)]},
    }
    assert engine.compared(arms)["ratios_to_stock"] == {
        "isojax": {"1x128x512": {"seconds": 0.5, "device_ms_a_step": 0.75}},
        "batch_invariant": {"32x128x512": {"seconds": 1.5}},
        # Its last row is of fewer runs than stock's.
        "isojax_llm": {"1x128x512": {"seconds": 0.5}},
    }


STAND_IN = """
import json, pathlib, sys, time
if sys.argv[1] == "batch_invariant":
    sys.exit(3)
out, log = pathlib.Path(sys.argv[-1]), pathlib.Path(sys.argv[-1]).with_name("log")
rows = {}
def report(served):
    found = [{"batch": 1, "prompt": 8, "output": 8, "name": name, "runs": runs} for name, runs in rows.items()]
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps({"served": served, "rows": found}))
    partial.replace(out)
report(0)
for served, line in enumerate(sys.stdin, start=1):
    with log.open("a") as file:
        file.write(f"{sys.argv[1]} starts {line}")
    time.sleep(0.05)
    with log.open("a") as file:
        file.write(f"{sys.argv[1]} ends {line}")
    rows[line.strip()] = rows.get(line.strip(), 0) + 1
    report(served)
"""
#: Stock vLLM's rows say how far its steps are apart, the paced arm's how far they were told to be.
PACED_STAND_IN = STAND_IN.replace(
    '"runs": runs} for',
    '"runs": runs, "seconds_between_steps": 0.25, **({"seconds_apart": 0.25} if " " in name else {})} for',
)


def test_arms_start_together_and_take_turns(tmp_path, monkeypatch):
    """With a stand-in for the engine: an arm that dies before it stands is no reason to wait."""
    (tmp_path / "engine_arm.py").write_text(STAND_IN)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    workloads = ["1x8x8", "2x8x8"]
    arms = {name: engine.Arm.start(name, tmp_path, workloads) for name in ("stock", "isojax", "batch_invariant")}
    for arm in arms.values():
        arm.wait_until_it_stands()
    *unfinished, found = engine.measured(arms, workloads, 2)
    assert {name: arm["exit_code"] for name, arm in found.items()} == {"stock": 0, "isojax": 0, "batch_invariant": 3}
    assert found["batch_invariant"]["rows"] == []
    assert [row["runs"] for row in found["stock"]["rows"]] == [2, 2]
    assert [len(each["isojax"]["rows"]) for each in unfinished] == [1, 2, 2, 2]
    lines = (tmp_path / "log").read_text().splitlines()
    turns = [line.split() for line in lines[::2]]
    assert [(name, workload) for name, _, workload in turns] == [
        ("stock", "1x8x8"),
        ("isojax", "1x8x8"),
        ("stock", "2x8x8"),
        ("isojax", "2x8x8"),
        ("isojax", "1x8x8"),
        ("stock", "1x8x8"),
        ("isojax", "2x8x8"),
        ("stock", "2x8x8"),
    ]
    # Nobody starts before the one before has ended.
    assert [line.replace("ends", "starts") for line in lines[1::2]] == lines[::2]


def _paced_arms(tmp_path, monkeypatch, script):
    (tmp_path / "engine_arm.py").write_text(script)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    arms = {name: engine.Arm.start(name, tmp_path, ["1x8x8"]) for name in ("stock", "isojax")}
    arms[engine.PACED] = dataclasses.replace(arms["isojax"], pace=arms["stock"])
    for arm in arms.values():
        arm.wait_until_it_stands()
    return arms


def test_a_paced_arm_keeps_stock_vllms_pace_in_our_own_arms_process(tmp_path, monkeypatch):
    arms = _paced_arms(tmp_path, monkeypatch, PACED_STAND_IN)
    *_, found = engine.measured(arms, ["1x8x8"], 2)
    assert [len(found[name]["rows"]) for name in arms] == [1, 1, 1]
    assert ["seconds_apart" in found[name]["rows"][0] for name in arms] == [False, False, True]
    turns = [line.split()[0::2] for line in (tmp_path / "log").read_text().splitlines()[::2]]
    told = [line.split()[3:] for line in (tmp_path / "log").read_text().splitlines()[::2]]
    assert [name for name, _ in turns] == ["stock", "isojax", "isojax", "isojax", "isojax", "stock"]
    assert told == [[], [], ["0.25"], ["0.25"], [], []]


def test_a_paced_arm_does_not_run_without_a_pace(tmp_path, monkeypatch):
    """Stock vLLM has died: there is nothing to compare with."""
    arms = _paced_arms(tmp_path, monkeypatch, PACED_STAND_IN.replace("batch_invariant", "stock"))
    *_, found = engine.measured(arms, ["1x8x8"], 1)
    assert [len(found[name]["rows"]) for name in arms] == [0, 1, 0]


def test_our_own_pace_needs_our_arm(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "--paced", "--arm", "batch_invariant"])
    with pytest.raises(SystemExit):
        engine.main()
    assert "--paced needs the arm isojax" in capsys.readouterr().err


def test_steps_start_as_far_apart_as_they_are_told():
    from vllm.v1.engine.llm_engine import LLMEngine

    steps, original = [], LLMEngine.step
    try:
        LLMEngine.step = lambda engine: steps.append(engine)
        with engine_arm.steps_apart(0.02) as starts:
            for number in range(4):
                LLMEngine.step(number)
        assert steps == [0, 1, 2, 3]
        assert min(b - a for a, b in itertools.pairwise(starts)) >= 0.02
        assert len(starts) == 4
    finally:
        LLMEngine.step = original


def test_an_arm_that_hangs_is_ended_and_what_it_measured_is_kept(tmp_path, monkeypatch, capsys):
    """While it measures, and when it should end."""
    hang = 'if rows and sys.argv[1] == "isojax":\n        time.sleep(600)\n    with log.open("a") as file:'
    script = (
        STAND_IN.replace('with log.open("a") as file:', hang, 1) + 'if sys.argv[1] == "stock":\n    time.sleep(600)\n'
    )
    (tmp_path / "engine_arm.py").write_text(script)
    monkeypatch.setattr(engine, "__file__", str(tmp_path / "engine.py"))
    arms = {name: engine.Arm.start(name, tmp_path, ["1x8x8"]) for name in ("stock", engine.BESIDE)}
    assert list(arms[engine.BESIDE].process.args)[2:4] == ["isojax", str(tmp_path / "beside")]
    for arm in arms.values():
        arm.wait_until_it_stands()
    monkeypatch.setattr(engine, "LONGEST_TURN", 1)
    *_, found = engine.measured(arms, ["1x8x8"], 2)
    assert {name: arm["exit_code"] for name, arm in found.items()} == {"stock": -9, engine.BESIDE: -9}
    assert [found[name]["rows"][0]["runs"] for name in arms] == [2, 1]
    assert capsys.readouterr().out.count("nothing for 1 s; it is ended") == 2


def test_a_workloads_first_run_is_not_counted(monkeypatch):
    asked = []

    def run(generate, workload, seed):
        asked.append(seed)
        return 10.0 if seed == 0 else float(seed)

    monkeypatch.setattr(engine_arm, "_seconds", run)
    monkeypatch.setattr(engine_arm, "replays_timed", lambda: nullcontext([]))
    monkeypatch.setattr(engine_arm, "steps_apart", lambda seconds: nullcontext([0.0, 1.0, 2.0, 9.0]))
    measured = engine_arm.Measured(engine_arm.Workload(2, 3, 5))
    for _ in range(3):
        measured.run(None)
    assert asked == [0, 1, 2, 3]
    found = measured.row()
    assert found.pop("seconds_between_steps") == 1.0
    assert found == {
        "batch": 2,
        "prompt": 3,
        "output": 5,
        "runs": 3,
        "seconds": 2.0,
        "seconds_spread": 2.0,
        "tokens_per_second": 5.0,
    }


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


@pytest.fixture
def stand_in_arm(tmp_path, monkeypatch):
    """Runs an arm without an engine over lines from its standard input; gives the file that it writes."""
    monkeypatch.setattr(engine_arm, "_started", lambda *given: nullcontext())
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

    def run(lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        engine_arm.main()

    return run, out


def test_an_arm_whose_benchmark_is_gone_does_not_measure(stand_in_arm):
    run, out = stand_in_arm
    with pytest.raises(SystemExit, match="nobody is left"):
        run("")
    assert json.loads(out.read_text()) == {"served": 0, "rows": []}


def test_paced_runs_have_a_row_and_prompts_of_their_own(stand_in_arm, monkeypatch):
    """A process that has computed a prompt finds it in its cache when it runs it once more."""
    seeds, paces = [], []
    monkeypatch.setattr(engine_arm, "_seconds", lambda generate, workload, seed: seeds.append(seed) or 2.0)
    monkeypatch.setattr(engine_arm, "replays_timed", lambda: nullcontext([]))
    monkeypatch.setattr(engine_arm, "steps_apart", lambda seconds: nullcontext(paces.append(seconds) or [0.0, 1.0]))
    run, out = stand_in_arm
    run("1x8x8 \n1x8x8 0.25\n1x8x8\n1x8x8 0.5\n")
    assert paces == [0.0, 0.25, 0.0, 0.5]
    assert len(set(seeds)) == len(seeds) == 6
    own, paced = json.loads(out.read_text())["rows"]
    assert (own["runs"], paced["runs"]) == (2, 2)
    assert "seconds_apart" not in own
    assert paced["seconds_apart"] == 0.375
