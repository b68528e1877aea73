"""A disk that takes no more, and steps that are not finite: said in one refusal, and the run goes on from before."""

import os
import resource
from contextlib import contextmanager

import numpy as np
import pytest
from rl_samples import leaf_bits, run_config, small_trainer

from contracts.errors import CannotWrite, NonFiniteLogits
from isojax.rl.files import write_atomically
from isojax.rl.metrics import read_metrics


@contextmanager
def no_file_above(size):
    """The operating system refuses every write beyond `size` bytes of a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_the_disk_does_not_take_ends_the_run_and_the_one_before_is_resumed(tmp_path):
    config = run_config(train={"steps": 3})
    whole = small_trainer(tmp_path / "whole", config)
    whole.run(show_progress=False)
    trainer = small_trainer(tmp_path / "run", config)
    trainer.step()
    trainer.checkpoints.save(trainer.learner.state, trainer.progress)
    # Room for a report, and none for a checkpoint's arrays.
    with no_file_above(40_000), pytest.raises(CannotWrite) as refusal:
        trainer.run(show_progress=False)
    text = str(refusal.value)
    assert str(trainer.folder.checkpoints / "2") in text
    assert "MiB free" in text
    assert "continue with --resume" in text
    trainer.close()
    assert trainer.checkpoints.latest() == 1
    again = small_trainer(tmp_path / "run", config)
    again.resume()
    assert again.progress.step == 1
    again.run(show_progress=False)
    assert leaf_bits(again.learner.state) == leaf_bits(whole.learner.state)
    assert [line["step"] for line in read_metrics(again.folder.metrics)] == [1, 2, 3]


def test_a_line_of_metrics_that_the_disk_does_not_take_ends_the_run_before_its_step_counts(tmp_path):
    config = run_config(train={"steps": 3})
    trainer = small_trainer(tmp_path / "run", config)
    trainer.step()
    trainer.checkpoints.save(trainer.learner.state, trainer.progress)
    size = trainer.folder.metrics.stat().st_size
    # Room for half a line.
    with no_file_above(size + 100), pytest.raises(CannotWrite, match=r"metrics\.jsonl"):
        trainer.step()
    assert trainer.progress.step == 1
    assert trainer.folder.metrics.stat().st_size == size + 100
    assert [line["step"] for line in read_metrics(trainer.folder.metrics)] == [1]
    again = small_trainer(tmp_path / "run", config)
    again.resume()
    again.run(show_progress=False)
    assert [line["step"] for line in read_metrics(again.folder.metrics)] == [1, 2, 3]


def test_after_a_line_that_was_not_written_its_step_is_not_checkpointed(tmp_path):
    """Or the resumed run would miss a line."""
    trainer = small_trainer(tmp_path / "run", run_config(train={"steps": 3, "checkpoint_every": 3}))
    trainer.step()
    with no_file_above(trainer.folder.metrics.stat().st_size + 100), pytest.raises(CannotWrite):
        trainer.run(show_progress=False)
    assert trainer.checkpoints.latest() is None


def test_a_file_that_is_replaced_stays_whole_when_the_disk_is_full(tmp_path):
    file = tmp_path / "report.html"
    write_atomically(file, "old")
    with no_file_above(1000), pytest.raises(CannotWrite, match="File too large"):
        write_atomically(file, "n" * 5000)
    assert file.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named_in_the_systems_own_words(tmp_path):
    trainer = small_trainer(tmp_path / "run")
    trainer.folder.metrics.symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match=r"metrics\.jsonl: found No space left on device"):
        trainer.step()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_not_applied_and_the_run_resumes_at_it(tmp_path, monkeypatch, value):
    config = run_config(train={"steps": 3, "checkpoint_every": 3})
    whole = small_trainer(tmp_path / "whole", config)
    whole.run(show_progress=False)
    trainer = small_trainer(tmp_path / "run", config)
    rewards = trainer.collector._rewards
    monkeypatch.setattr(
        trainer.collector, "_rewards", lambda *given: rewards(*given) * (value if trainer.progress.step else 1)
    )
    with pytest.raises(NonFiniteLogits, match=r"step 2, (loss|gradient norm): found .*The update was not applied"):
        trainer.run(show_progress=False)
    trainer.close()
    assert [line["step"] for line in read_metrics(trainer.folder.metrics)] == [1]
    again = small_trainer(tmp_path / "run", config)
    again.resume()
    assert again.progress.step == 1
    again.run(show_progress=False)
    assert leaf_bits(again.learner.state) == leaf_bits(whole.learner.state)


def test_not_finite_in_a_later_minibatch_resumes_before_the_first(tmp_path, monkeypatch):
    """By then a weight has moved: nothing consistent is in memory, and the checkpoint on the disk is what counts."""
    config = run_config(train={"steps": 3}, algorithm={"minibatches": 2})
    trainer = small_trainer(tmp_path / "run", config)
    trainer.step()
    trainer.checkpoints.save(trainer.learner.state, trainer.progress)
    step, calls = trainer.learner._step, []

    def spoiled(part):
        calls.append(part)
        return step(part if len(calls) == 1 else part._replace(loss=np.nan))

    monkeypatch.setattr(trainer.learner, "_step", spoiled)
    with pytest.raises(NonFiniteLogits, match="step 2, loss"):
        trainer.run(show_progress=False)
    assert trainer.checkpoints.latest() == 1
