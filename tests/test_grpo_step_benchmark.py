"""The benchmark of whole steps off a card: equal work in both arms, every part in the file, ratios of medians."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent / "isojax" / "rl"))

import grpo_step
import grpo_step_arm
from grpo_step_results import ARMS, PARTS, Results
from reference_engine import ReferenceEngine
from rl_samples import honest_report

from contracts import load_contract
from isojax import Policy
from isojax.rl.card import run_shapes
from isojax.rl.memory_split import memory_split
from isojax.weights.load import load_policy

pytestmark = pytest.mark.long_file(40)

SMALL = ["--shapes", "small", "--layers", "1", "--prompts", "2", "--group", "2", "--prompt", "4", "--tokens", "4"]
SMALL += ["--sequences", "2", "--warm-up", "1", "--steps", "2", "--syncs", "2"]
CARD_BYTES = 139 << 30


def _config(arm, *arguments):
    options = grpo_step.parser().parse_args(["out.json", *arguments])
    policy = grpo_step_arm.policy_config(options)
    return policy, grpo_step_arm.run_config(arm, options, policy, Path("prompts.jsonl"))


def _open_engine(name, folder, *, arm, **settings):
    """Instead of vLLM: the policy's own forward in both arms."""
    contract = load_contract(folder) if arm == "exact" else None
    report = honest_report(contract) if contract else None
    return ReferenceEngine(load_policy(folder), contract, report)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """Both arms' numbers, measured in this process."""
    out = tmp_path_factory.mktemp("grpo") / "out.json"
    options = grpo_step.parser().parse_args([str(out), *SMALL])
    results = Results(out)
    results.start(grpo_step.workload(options), "command", ARMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isojax.rl.assemble.open_engine", _open_engine)
        for arm in ARMS:
            found = {}
            (out.parent / arm).mkdir()
            for _ in grpo_step_arm.measured(arm, options, out.parent / arm, found):
                results.record_arm(arm, found)
    return results.read()


@pytest.mark.slow
def test_both_arms_do_the_same_work_and_every_part_is_timed(content):
    for arm in ARMS:
        found = content["arms"][arm]
        assert len(found["warm_up"]) == 1
        assert [step["tokens"] for step in found["steps"]] == [2 * 2 * 4] * 2
        for step in found["steps"]:
            parts = [step[f"seconds_{part}"] for part in PARTS]
            assert all(part > 0 for part in parts)
            assert sum(parts) <= step["seconds_step"]
            assert step["updates"] == 1
            assert step["memory_process_bytes"] > 1 << 20
        assert found["sync_ms"]["least"] <= found["sync_ms"]["median"] <= found["sync_ms"]["most"]
    assert sum(step["mismatch_tokens"] for step in content["arms"]["exact"]["steps"]) == 0
    # The engine runs regions in both arms, so what the native arm counts is its own.
    assert sum(step["mismatch_tokens"] for step in content["arms"]["native"]["steps"]) > 0


def test_ratios_are_those_of_the_medians(content):
    exact, native = (content["arms"][arm]["medians"]["seconds_train"]["median"] for arm in ARMS)
    assert content["exact_over_native"]["seconds_train"] == exact / native
    assert set(content["exact_over_native"]) == {"seconds_step", *(f"seconds_{part}" for part in PARTS), "sync_ms"}


def test_an_arm_measured_again_leaves_the_other_and_another_workload_is_refused(content, tmp_path):
    out = tmp_path / "out.json"
    out.write_text(json.dumps(content))
    Results(out).start(content["workload"], "again", ["native"])
    left = Results(out).read()
    assert left["arms"] == {"exact": content["arms"]["exact"]}
    assert left["exact_over_native"] == {}
    with pytest.raises(SystemExit, match="holds another workload"):
        Results(out).start({**content["workload"], "tokens": 9}, "another", ARMS)


@pytest.mark.parametrize("text", ["{", "[1]", '{"rows": []}'])
def test_a_file_of_something_else_is_left_as_it_is(text, tmp_path):
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(SystemExit, match="name another file"):
        grpo_step.main([str(out), *SMALL])
    assert out.read_text() == text


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--layers", "0", "0 is less than 1"),
        ("--steps", "0", "0 is less than 1"),
        ("--syncs", "-1", "-1 is less than 1"),
        ("--group", "1", "1 is less than 2"),
        ("--warm-up", "-1", "-1 is less than 0"),
        ("--tokens", "eight", "invalid"),
    ],
)
def test_a_number_that_measures_nothing_is_refused_by_its_option(option, value, says, tmp_path, capsys):
    with pytest.raises(SystemExit):
        grpo_step.main([str(tmp_path / "out.json"), option, value])
    assert f"argument {option}" in (error := capsys.readouterr().err)
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_dies_is_written_down_and_the_other_still_runs(tmp_path, monkeypatch):
    script = "import sys\nprint(sys.argv)\nsys.exit(3 if sys.argv[1] == 'exact' else 0)\n"
    (tmp_path / "grpo_step_arm.py").write_text(script)
    monkeypatch.setattr(grpo_step, "__file__", str(tmp_path / "grpo_step.py"))
    ran = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **given: ran.append(command[2]) or run(command, **given))
    assert grpo_step.main([str(tmp_path / "out.json"), *SMALL]) == 1
    assert ran == list(ARMS)
    assert Results(tmp_path / "out.json").read()["arms"]["exact"]["failed"] == "exit code 3"


def test_the_card_has_room_and_no_padding_in_either_arm():
    policy, config = _config("exact", "--shapes", "qwen3_1b7")
    shapes = run_shapes(config, policy.max_position)
    length = 128 + 512
    assert shapes.trainer_tokens[-1] == config.train.micro_batch_tokens == 16 * length
    assert length % 64 == 0
    for arguments in (["--shapes", "qwen3_1b7"], ["--shapes", "qwen3_8b", "--layers", "16"]):
        policy, config = _config("exact", *arguments)
        engine = config.engine
        split = memory_split(
            Policy(policy).parameter_shapes,
            kv_cache_bytes=engine.settings["kv_cache_bytes"],
            reserve_bytes=engine.memory.reserve_bytes,
            with_reference=False,
        )
        split.require_fit(CARD_BYTES, trainer_bytes=CARD_BYTES * 3 // 4)


def test_the_arms_differ_in_nothing_else():
    exact, native = (_config(arm)[1].model_dump() for arm in ARMS)
    assert exact["policy"].pop("arm") == "exact"
    assert native["policy"].pop("arm") == "native"
    assert exact == native
