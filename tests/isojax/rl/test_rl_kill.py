"""kill -9: what a process leaves behind at any moment is resumed, with the bits of a run that nobody killed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rl_samples import leaf_bits, run_config, small_trainer

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import kill_resume
import kill_resume_runs

from contracts.errors import BadCheckpoint
from isojax.rl.config_file import load_config
from isojax.rl.run_folder import RunFolder

STEPS = "8"


class _SmallRun(kill_resume_runs.Place):
    """A run without vLLM, that resumes where it can."""

    def command(self, resume):
        return [sys.executable, str(Path(__file__).with_name("kill_run.py")), str(self.folder.path), STEPS]


def _small_run(place: Path) -> _SmallRun:
    return _SmallRun(place, RunFolder(place))


@pytest.mark.slow
@pytest.mark.long_file(70)
def test_runs_that_were_killed_side_by_side_end_with_the_bits_of_one_that_was_not(tmp_path):
    whole, *killed = (_small_run(tmp_path / name) for name in ("whole", "killed", "other"))
    kill_resume_runs.finish(whole)
    moments = []
    arguments = SimpleNamespace(kills=3, runs=2, seed=1)
    pace = kill_resume_runs.Pace(to_first_step=5.0, a_step=0.3)
    found = list(kill_resume.killed_side_by_side(whole, killed, pace, arguments, moments))
    assert found == [["1 runs did not end"], []]
    assert sorted(moment["run"] for moment in moments) == [0, 0, 1]
    assert any(moment["newest_checkpoint"] for moment in moments)
    assert kill_resume_runs.newest(killed[0].folder) == int(STEPS)
    # The comparison sees what it should.
    text = killed[0].folder.metrics.read_text()
    killed[0].folder.metrics.write_text(text.replace('"policy_version": 3', '"policy_version": 4'))
    assert kill_resume_runs.differences(whole.folder, killed[0].folder) == ["metrics of step 3"]


def test_a_run_that_fails_is_named_and_the_others_are_compared(tmp_path):
    class Broken(_SmallRun):
        def command(self, resume):
            return [sys.executable, "-c", "raise SystemExit('the card is gone')"]

    class Ended(_SmallRun):
        def command(self, resume):
            assert resume, "it has its last checkpoint"
            return [sys.executable, "-c", ""]

    trainer = small_trainer(tmp_path / "whole", run_config(train={"steps": 1}))
    trainer.run(show_progress=False)
    trainer.close()
    whole = Ended(tmp_path, RunFolder(tmp_path / "whole"))
    broken = Broken(tmp_path, RunFolder(tmp_path / "broken"))
    arguments = SimpleNamespace(kills=0, runs=2, seed=1)
    pace = kill_resume_runs.Pace(to_first_step=5.0, a_step=0.3)
    *_, found = kill_resume.killed_side_by_side(whole, [broken, whole], pace, arguments, [])
    assert len(found) == 1
    assert found[0].startswith("run 0: RuntimeError")
    assert "the card is gone" in found[0]


@pytest.mark.parametrize(("option", "value"), [("--runs", "0"), ("--steps", "0"), ("--kills", "-1")])
def test_a_number_that_kills_nothing_is_refused_before_anything_runs(option, value, capsys):
    with pytest.raises(SystemExit):
        kill_resume.parser().parse_args([option, value])
    assert f"argument {option}: {value} is less than" in capsys.readouterr().err


def test_a_killed_run_starts_from_the_whole_runs_policy(tmp_path):
    text = kill_resume.with_every_step_kept(kill_resume.EXAMPLE.read_text(), 7)
    config = tmp_path / "config.toml"
    config.write_text(kill_resume.with_policy(text, tmp_path / "policy"))
    found, given = load_config(config), load_config(kill_resume.EXAMPLE)
    assert found.policy.source == str(tmp_path / "policy")
    assert found.policy.random is None
    assert (found.train.steps, found.train.checkpoint_every) == (7, 1)
    assert found.model_copy(update={"policy": given.policy, "train": given.train}) == given


def test_runs_under_the_same_flags_share_what_was_compiled_and_tuned(tmp_path):
    one, other = (kill_resume.run_environment(tmp_path, True, gpu) for gpu in ("0", "1"))
    assert "--xla_gpu_exclude_nondeterministic_ops=true" in one["XLA_FLAGS"]
    assert {name for name in one if one[name] != other[name]} == {"CUDA_VISIBLE_DEVICES"}
    plain = kill_resume.run_environment(tmp_path, False, None)
    assert "CUDA_VISIBLE_DEVICES" not in plain
    assert plain["JAX_COMPILATION_CACHE_DIR"] != one["JAX_COMPILATION_CACHE_DIR"]
    assert "nondeterministic" not in plain["XLA_FLAGS"]


@pytest.mark.parametrize(("given", "count", "found"), [("", 0, [None]), ("", 2, ["0", "1"]), ("3,5", 2, ["3", "5"])])
def test_runs_are_spread_over_the_gpus_that_there_are(monkeypatch, given, count, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(kill_resume.torch.cuda, "device_count", lambda: count)
    assert kill_resume.visible_gpus() == found


def test_a_run_of_other_weights_differs_in_them(tmp_path):
    runs = []
    for name, rate in (("one", 5e-3), ("other", 6e-3)):
        trainer = small_trainer(tmp_path / name, run_config(optimizer={"learning_rate": rate}, train={"steps": 1}))
        trainer.run(show_progress=False)
        trainer.close()
        runs.append(trainer.folder)
    found = kill_resume_runs.differences(*runs)
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
