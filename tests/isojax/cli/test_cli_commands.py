"""The command line: exit codes, readable refusals, and no traceback for a user's mistake."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import isojax.cli.main as command_line
from contracts import load_contract, save_contract
from isojax.cli.main import COMMANDS, main
from isojax.evidence.drift import LogProbs, save_log_probs
from isojax.rl.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))
from reference_engine import ReferenceEngine, one_bit_off
from rl_samples import RAW_POLICY, honest_report, raw_run, small_contract, small_params, small_policy

TASK = """
def examples():
    return [{"tokens": [0, digit], "digit": digit} for digit in (1, 2, 3)]

def reward(example, tokens, text):
    return sum(token == example.fields["digit"] for token in tokens) / len(tokens)
"""


def toml(values, prefix=""):
    """A mapping of mappings as TOML."""
    plain = [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    tables = [
        f"[{prefix}{key}]\n{toml(value, f'{prefix}{key}.')}" for key, value in values.items() if isinstance(value, dict)
    ]
    return "\n".join([*plain, *tables])


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a configuration and its task; runs use the reference engine."""
    (tmp_path / "sample_task.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(toml(raw_run()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sample_task", raising=False)

    def open_engine(name, folder, **settings):
        return ReferenceEngine(small_policy(), load_contract(folder), honest_report(load_contract(folder)))

    monkeypatch.setattr("isojax.rl.assemble.open_engine", open_engine)
    # The policy of the tests, so that nothing is compiled twice; it is the one in the exported folder.
    monkeypatch.setattr("isojax.rl.assemble.load", lambda folder, dtype, remat: (small_policy(), small_params()))
    return tmp_path


def refusal(capsys):
    """What was written to stderr; nothing else may be there."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


def test_train_export_and_resume(workplace, capsys):
    assert main(["train", "run.toml", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "0 of 48 sampled tokens and 0 of 10 full rows differ" in said
    run = Path("runs/small")
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert (run / "report.html").exists()

    longer = raw_run(train={"steps": 3})
    Path("run.toml").write_text(toml(longer))
    assert main(["train", "run.toml", "--quiet", "--resume"]) == 0
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]

    assert main(["export", str(run / "checkpoints" / "3"), "--out", "policy"]) == 0
    assert lines[-1]["weight_digest"] in capsys.readouterr().out
    assert load_contract("policy").identities == load_contract(run / "policy").identities
    assert main(["export", str(run), "--out", str(run / "policy")]) == 2
    assert "would be lost" in refusal(capsys)
    assert main(["export", str(run), "--out", "newest"]) == 0
    assert main(["export", "runs/absent", "--out", "other"]) == 2
    assert "runs/absent" in refusal(capsys)


def test_a_second_run_of_a_name_gets_a_folder_of_its_own(workplace):
    Path("run.toml").write_text(toml(raw_run(train={"steps": 1})))
    assert main(["train", "run.toml", "--quiet"]) == 0
    assert main(["train", "run.toml", "--quiet"]) == 0
    assert Path("runs/small-2/metrics.jsonl").exists()


def test_a_difference_ends_a_run_with_exit_code_one(workplace, capsys, monkeypatch):
    honest = ReferenceEngine.generate

    def dishonest(self, prompts, sampling, *, full_rows=0):
        completions = honest(self, prompts, sampling, full_rows=full_rows)
        return [one_bit_off(completions[0], 0), *completions[1:]]

    monkeypatch.setattr(ReferenceEngine, "generate", dishonest)
    assert main(["train", "run.toml", "--quiet"]) == 1
    text = refusal(capsys)
    assert "difference found" in text
    assert "1 of 24 sampled tokens" in text


def test_ctrl_c_ends_a_run_in_order(workplace, capsys, monkeypatch):
    honest = ReferenceEngine.generate

    def interrupted(self, prompts, sampling, *, full_rows=0):
        if len(self.calls) == 1:
            raise KeyboardInterrupt
        return honest(self, prompts, sampling, full_rows=full_rows)

    monkeypatch.setattr(ReferenceEngine, "generate", interrupted)
    assert main(["train", "run.toml", "--quiet"]) == 130
    text = refusal(capsys)
    assert "stopped after step 1" in text
    assert "--resume runs/small" in text
    assert Path("runs/small/checkpoints/1").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout": {"group_sise": 3}}, ("rollout.group_sise", "run.toml", "Did you mean 'group_size'?")),
        ({"rollout": {"top_p": 0.9}}, ("UnsupportedRequest", "rollout.top_p", "kept mass")),
        ({"rollout": {"max_tokens": 31}}, ("PromptTooLong", "prompt 0", "32 tokens in all")),
        ({"train": {"micro_batch_tokens": 4}}, ("train.micro_batch_tokens", "at least 5")),
        ({"task": {"reward": "sample_task:absent"}}, ("task.reward", "examples", "no function 'absent'")),
        ({"task": {"source": "jsonl", "path": "none.jsonl"}}, ("task.path", "none.jsonl")),
        ({"policy": {"random": RAW_POLICY | {"model_type": "mamba"}}}, ("model_type", "mamba")),
        ({"policy": {"random": RAW_POLICY | {"num_key_value_heads": 3}}}, ("num_key_value_heads",)),
    ],
)
def test_mistakes_in_a_configuration_are_refused_before_an_engine_starts(workplace, capsys, change, says):
    Path("run.toml").write_text(toml(raw_run(**change)))
    assert main(["train", "run.toml", "--quiet"]) == 2
    text = refusal(capsys)
    for part in says:
        assert part in text
    assert not Path("runs/small").exists()


def test_a_missing_configuration_checkpoint_or_run_is_refused(workplace, capsys):
    for arguments in (["train", "absent.toml"], ["train", "run.toml", "--resume"], ["contract", "show", "absent"]):
        assert main(arguments) == 2
        assert "isojax: refused" in refusal(capsys)


@pytest.fixture
def contract_files(tmp_path):
    contract = small_contract()
    entry = next(item for item in contract.composition if item.region == "matmul")
    constants = {**entry.constants, "leaves": 8}
    other = contract.replaced(
        composition=tuple(
            item.model_copy(update={"constants": type(entry.constants)(constants)}) if item is entry else item
            for item in contract.composition
        )
    )
    for name, value in (("one", contract), ("other", other)):
        (tmp_path / name).mkdir()
        save_contract(value, tmp_path / name)
    return tmp_path / "one", tmp_path / "other"


def test_contract_check_accepts_what_is_claimed_and_refuses_the_rest(contract_files, capsys):
    one = str(contract_files[0])
    assert main(["contract", "check", one, "--mesh", "dp=2"]) == 0
    assert main(["contract", "check", one, "--mesh", "tp=3"]) == 2
    text = refusal(capsys)
    assert "tp=3" in text
    assert "2 heads and 1 KV heads" in text
    assert main(["contract", "check", one, "--mesh", "tp:3"]) == 2
    assert main(["contract", "check", one, "--mesh", "zz=1"]) == 2


def test_contract_diff_names_the_constant_and_what_rotates(contract_files, capsys):
    one, other = map(str, contract_files)
    assert main(["contract", "diff", one, one]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["contract", "diff", one, other]) == 1
    said = capsys.readouterr().out
    assert "composition.matmul" in said
    assert "leaves" in said
    assert "numerical_policy: rotates" in said
    assert "deployment: unchanged" in said


def test_contract_show_lists_what_matters(contract_files, capsys):
    one = str(contract_files[0])
    assert main(["contract", "show", one]) == 0
    said = capsys.readouterr().out
    for part in ("llama", "matmul", "trainer_score", small_contract().identities.numerical_policy):
        assert part in said
    assert main(["contract", "show", one, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_drift_of_two_dumps(tmp_path, capsys):
    for name, value in (("a", -1.0), ("b", -1.5)):
        save_log_probs(tmp_path / f"{name}.jsonl", LogProbs(((7,),), (np.array([value], np.float32),)))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert main(["drift", a, a]) == 0
    assert main(["drift", a, b]) == 1
    assert "max |difference|   5.000e-01" in capsys.readouterr().out
    assert main(["drift", a]) == 2
    assert main(["drift", a, str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in refusal(capsys)


def test_bisect_of_a_policy_with_itself_and_with_a_saved_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("isojax.cli.bisect.load", lambda folder: (small_policy(), small_params()))
    tokens = ["--tokens", ",".join(["1"] * 8)]
    saved = str(tmp_path / "run.npz")
    assert main(["bisect", "policy", "--save", saved, *tokens]) == 0
    assert main(["bisect", "policy", "--right", saved, *tokens]) == 0
    monkeypatch.setattr("isojax.cli.bisect.load", lambda folder: (small_policy(), small_params(seed=1)))
    capsys.readouterr()
    assert main(["bisect", "policy", "--right", saved, *tokens]) == 1
    assert "first difference: region rms_norm, outside of the layers, row 0" in capsys.readouterr().out
    for wrong in (["--tokens", "1,x"], ["--tokens", "999"], ["--right", "absent"], ["--right", "absent.npz"]):
        assert main(["bisect", "policy", *wrong]) == 2
        assert "isojax: refused" in refusal(capsys)


def test_verify_lists_every_gate_with_its_result(capsys):
    assert main(["verify", "--gate", "cast"]) == 0
    assert "pass  cast" in capsys.readouterr().out
    assert main(["verify", "--gate", "cast", "--json"]) == 0
    (gate,) = json.loads(capsys.readouterr().out)["gates"]
    assert (gate["name"], gate["passed"]) == ("cast", True)
    assert main(["verify", "--gate", "absent"]) == 2
    assert "cast" in refusal(capsys)


def test_a_failing_gate_gives_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr("isojax.evidence.cpu_gates.pallas_kernels.cast", lambda x, dtype: (x * 1.01).astype(dtype))
    assert main(["verify", "--gate", "cast"]) == 1
    assert "FAIL  cast" in capsys.readouterr().out


def test_doctor_says_what_is_installed_and_what_will_work(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for part in ("jax", "torch", "cores", "what will work", "train and score"):
        assert part in said
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["jax"]


def test_every_command_explains_itself(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2


def test_a_bug_is_not_dressed_up_as_a_refusal(monkeypatch):
    """Only refusals and the operating system's own errors are turned into a line; anything else keeps its traceback."""
    monkeypatch.setattr("isojax.cli.doctor.diagnose", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])
    monkeypatch.setattr("isojax.cli.doctor.diagnose", lambda: Path("/nonexistent/file").read_text())
    assert main(["doctor"]) == 2


def test_the_console_script_is_installed_and_survives_a_closed_pipe():
    script = Path(sys.executable).with_name("isojax")
    found = subprocess.run(
        f"{script} doctor --json | head -c 1", shell=True, capture_output=True, text=True, check=True
    )
    assert found.stdout == "{"
    assert "Traceback" not in found.stderr
    assert command_line.INTERRUPTED == 130
