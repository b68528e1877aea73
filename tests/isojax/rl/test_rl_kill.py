"""kill -9: what a process leaves behind at any moment is resumed, with the bits of a run that nobody killed."""

import random
import sys
from pathlib import Path

import pytest
from rl_samples import leaf_bits, run_config, small_trainer

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import kill_resume

from contracts.errors import BadCheckpoint
from isojax.rl.run_folder import RunFolder

STEPS = "8"


@pytest.mark.slow
@pytest.mark.long_file(50)
def test_a_run_that_was_killed_twice_ends_with_the_bits_of_one_that_was_not(tmp_path):
    def command_in(folder):
        return lambda resume: [sys.executable, str(Path(__file__).with_name("kill_run.py")), str(folder), STEPS]

    whole, killed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    kill_resume.finish(command_in(whole.path)(False), {})
    moments = kill_resume.kill_and_resume(command_in(killed.path), killed, {}, kills=2, random_=random.Random(1))
    assert len(moments) == 2
    assert any(moment["newest_checkpoint"] for moment in moments)
    assert kill_resume.newest(killed) == int(STEPS)
    assert kill_resume.differences(whole, killed) == []
    # The comparison sees what it should.
    text = killed.metrics.read_text()
    killed.metrics.write_text(text.replace('"policy_version": 3', '"policy_version": 4'))
    assert kill_resume.differences(whole, killed) == ["metrics of step 3"]


def test_a_run_of_other_weights_differs_in_them(tmp_path):
    runs = []
    for name, rate in (("one", 5e-3), ("other", 6e-3)):
        trainer = small_trainer(tmp_path / name, run_config(optimizer={"learning_rate": rate}, train={"steps": 1}))
        trainer.run(show_progress=False)
        trainer.close()
        runs.append(trainer.folder)
    found = kill_resume.differences(*runs)
    assert "['master']['lm_head']" in found
    assert "progress" in found


def test_a_half_written_checkpoint_is_named_and_not_used(tmp_path, capsys):
    first = small_trainer(tmp_path / "run", run_config(train={"steps": 2}))
    first.run(show_progress=False)
    first.close()
    # What orbax leaves behind when it is killed while it writes.
    half = first.folder.checkpoints / "3.orbax-checkpoint-tmp" / "state.orbax-checkpoint-tmp"
    half.mkdir(parents=True)
    again = small_trainer(tmp_path / "run", run_config(train={"steps": 4}))
    again.resume()
    assert "half-written and not used: 3.orbax-checkpoint-tmp; continuing after step 2" in capsys.readouterr().err
    assert leaf_bits(again.learner.state) == leaf_bits(first.learner.state)
    # In its place the whole one is written.
    again.run(show_progress=False)
    assert again.checkpoints.unfinished() == []
    assert again.checkpoints.latest() == 4


def test_with_only_half_a_checkpoint_there_is_nothing_to_resume_and_it_is_said(tmp_path):
    trainer = small_trainer(tmp_path / "run")
    (trainer.folder.checkpoints / "1.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(BadCheckpoint, match=r"no complete checkpoint in .*half-written: 1\.orbax-checkpoint-tmp"):
        trainer.resume()


@pytest.mark.parametrize("left", ["everything", "metadata", "state"])
def test_an_older_checkpoint_that_was_half_deleted_does_no_harm(tmp_path, left):
    """kill -9 while orbax deletes what is beyond `keep_checkpoints`: some files of a complete name are gone."""
    trainer = small_trainer(tmp_path / "run", run_config(train={"steps": 2}))
    trainer.run(show_progress=False)
    trainer.close()
    old = trainer.folder.checkpoints / "1"
    for path in sorted(old.rglob("*"), reverse=True):
        kept = {"everything": False, "metadata": path.name.startswith("_"), "state": "state" in path.parts}[left]
        if path.is_file() and not kept:
            path.unlink()
    again = small_trainer(tmp_path / "run", run_config(train={"steps": 3}))
    again.resume()
    assert again.progress == trainer.progress
    again.run(show_progress=False)
    assert again.checkpoints.latest() == 3
    assert not old.exists()
    with pytest.raises(BadCheckpoint):
        again.checkpoints.restore(1, again.learner.state)


def test_metrics_beyond_the_newest_checkpoint_are_written_again(tmp_path):
    """kill -9 between a step's line and its checkpoint."""
    trainer = small_trainer(tmp_path / "run", run_config(train={"steps": 9, "checkpoint_every": 2}))
    for _ in range(3):
        trainer.step()
        if trainer.progress.step == 2:
            trainer.checkpoints.save(trainer.learner.state, trainer.progress)
    lines = trainer.folder.metrics.read_text()
    again = small_trainer(tmp_path / "run", run_config(train={"steps": 9, "checkpoint_every": 2}))
    again.resume()
    assert again.progress.step == 2
    assert again.folder.metrics.read_text() == "".join(lines.splitlines(keepends=True)[:2])
    again.step()
    assert leaf_bits(again.learner.params) == leaf_bits(trainer.learner.params)
