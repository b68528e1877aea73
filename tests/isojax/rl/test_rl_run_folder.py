"""What a run leaves in its folder: metrics, configuration, checkpoints to export; damaged ones are refused."""

import dataclasses
import json

import pytest
from rl_samples import run_config

from contracts.errors import BadCheckpoint, BadConfig, Refusal
from isojax.rl import assemble
from isojax.rl.checkpoint_policy import load_checkpoint
from isojax.rl.metrics import MetricsFile, StepMetrics, read_metrics
from isojax.rl.report import run_summary
from isojax.rl.run_folder import RunFolder, latest_run, new_run

_LINE = {field.name: 0 for field in dataclasses.fields(StepMetrics)}


def test_a_half_written_metrics_line_is_dropped_and_a_resume_cuts_what_is_beyond(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    lines = [json.dumps({**_LINE, "step": step}) + "\n" for step in (1, 2, 3)]
    file.path.write_text("".join(lines) + '{"step": 4')
    assert [line["step"] for line in read_metrics(file.path)] == [1, 2, 3]
    file.cut_after(2)
    assert file.path.read_text() == "".join(lines[:2])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"garbage", "not JSON"),
        (b"[1]", "a JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"step": 1}', "no reward_mean"),
        (json.dumps({**_LINE, "step": "1"}).encode(), "step '1'"),
    ],
)
def test_a_metrics_line_that_is_no_steps_is_named(tmp_path, line, says):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(json.dumps(_LINE).encode() + b"\n" + line + b"\n")
    with pytest.raises(BadCheckpoint, match=says) as refusal:
        read_metrics(file)
    assert "metrics.jsonl, line 2" in str(refusal.value)


def test_a_run_without_metrics_has_a_summary(tmp_path):
    assert "holds no step" in run_summary(RunFolder(tmp_path))


def test_a_resumed_run_may_be_longer_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config())
    folder.require_same_config(run_config(train={"steps": 50, "keep_checkpoints": 9}))
    with pytest.raises(BadConfig, match=r"optimizer\.learning_rate"):
        folder.require_same_config(run_config(optimizer={"learning_rate": 1.0}))
    with pytest.raises(BadConfig, match="isojax train wrote"):
        RunFolder(tmp_path / "absent").require_same_config(run_config())
    folder.config.write_text("[]")
    with pytest.raises(BadConfig, match="a JSON object") as refusal:
        folder.require_same_config(run_config())
    assert refusal.value.field.endswith("config.json")


def test_a_run_of_a_version_that_had_no_meshes_is_resumed(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config())
    written = json.loads(folder.config.read_text())
    del written["train"]["mesh"], written["train"]["compilation_cache"], written["metrics"]
    folder.config.write_text(json.dumps(written))
    folder.require_same_config(run_config())
    assert capsys.readouterr().err == ""
    folder.require_same_config(run_config(train={"mesh": {"dp": 2}}))
    assert "train.mesh.dp was 1 and is 2" in capsys.readouterr().err


def test_a_refused_resume_does_not_speak_of_the_mesh(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config())
    with pytest.raises(BadConfig, match=r"optimizer\.learning_rate"):
        folder.require_same_config(run_config(train={"mesh": {"dp": 2}}, optimizer={"learning_rate": 1.0}))
    assert capsys.readouterr().err == ""


def test_a_resume_that_is_refused_keeps_the_configuration_that_the_run_had(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config())
    before = folder.config.read_text()
    monkeypatch.setattr(assemble, "open_task", lambda *given: None)
    longer = run_config(train={"steps": 9})
    with pytest.raises(Refusal, match="policy"):
        assemble.assemble(longer, config_folder=tmp_path, folder=folder, resume=True)
    assert folder.config.read_text() == before


def test_runs_of_one_name_never_overwrite_each_other(tmp_path):
    assert [new_run(tmp_path, "copy").path.name for _ in range(3)] == ["copy", "copy-2", "copy-3"]
    assert latest_run(tmp_path, "copy").path.name == "copy-3"
    with pytest.raises(BadConfig, match="Nothing to resume"):
        latest_run(tmp_path, "other")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_run_with_a_damaged_configuration_is_not_exported(tmp_path, content):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_checkpoint(tmp_path / "checkpoints" / "1")


def test_a_folder_that_is_no_run_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path, tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / "²"):
        with pytest.raises(BadCheckpoint, match="no training checkpoint"):
            load_checkpoint(place)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
