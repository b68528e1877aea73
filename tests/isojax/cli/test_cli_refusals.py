"""Bad arguments and files on the command line: four readable lines and exit code 2."""

import sys
from pathlib import Path

import pytest

from contracts import bits_float, float_bits, save_contract
from isojax.cli.main import main
from isojax.evidence.drift import LogProbs

sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))
from rl_samples import small_contract, small_params, small_policy

DUMP = '{"tokens": [1, 2], "log_probs": [-1.0, -2.0], "prompt": [3]}\n'


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A contract of temperature 0.5 and a dump, in the current folder."""
    contract = small_contract()
    semantics = contract.semantics.model_copy(update={"temperature": float_bits(0.5)})
    (tmp_path / "policy").mkdir()
    save_contract(contract.replaced(semantics=semantics), tmp_path / "policy")
    (tmp_path / "dump.jsonl").write_text(DUMP)
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    for command in ("bisect", "drift"):
        monkeypatch.setattr(f"isojax.cli.{command}.load", lambda folder: (small_policy(), small_params()))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["contract", "check", "policy", "--mesh", ""], ("--mesh", "names no mesh")),
        (["contract", "check", "policy", "--mesh", ","], ("--mesh", "names no mesh")),
        (["contract", "check", "policy", "--mesh", "tp=" + "9" * 5000], ("mesh", "at most once")),
        (["drift", "dump.jsonl", "--save", "."], ("Is a directory", "operating system")),
        (["drift", ".", "dump.jsonl"], ("dump", "Is a directory")),
        (["drift", "empty.jsonl", "trainer:policy"], ("EmptyBatch", "nothing to score")),
        (["bisect", "policy", "--tokens", "99999999999"], ("sequences[0][0]", "0 to 15")),
        (["bisect", "policy", "--tokens", "1", "--right", "dump.npz"], ("dump.npz", "bisect --save")),
        (["train", "."], ("config", "Is a directory")),
    ],
)
def test_bad_arguments_are_refused_in_four_lines(place, capsys, monkeypatch, arguments, says):
    monkeypatch.setattr("isojax.cli.bisect.open_executor", lambda name: lambda *given: [])
    (place / "dump.npz").write_bytes(b"")
    assert main(arguments) == 2
    text = capsys.readouterr().err
    assert [line.split()[0] for line in text.splitlines()] == ["isojax:", "field", "found", "allowed", "reason"]
    for part in says:
        assert part in text


def test_a_path_that_cannot_be_written_is_refused_by_name(place, capsys, monkeypatch):
    monkeypatch.setattr("isojax.cli.bisect.open_executor", lambda name: lambda *given: [])
    assert main(["bisect", "policy", "--tokens", "1", "--save", "absent/run.npz"]) == 2
    text = capsys.readouterr().err
    for part in ("field    absent/run.npz", "No such file", "allowed", "reason"):
        assert part in text


def test_the_trainer_scores_a_dump_at_the_contracts_temperature(place, monkeypatch):
    asked = []

    def score_like(other: LogProbs, policy, params, *, temperature):
        asked.append(temperature)
        return other

    monkeypatch.setattr("isojax.cli.drift.score_like", score_like)
    assert main(["drift", "dump.jsonl", "trainer:policy"]) == 0
    assert main(["drift", "dump.jsonl", "trainer:without_contract"]) == 0
    assert asked == [0.5, 1.0]
    assert bits_float(small_contract().semantics.temperature) == 1.0
