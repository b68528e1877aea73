"""TensorBoard as a second sink: every number of a step, or a refusal before anything starts."""

import importlib.util
import sys
import types

import pytest
from rl_samples import run_config, small_trainer

from contracts.errors import BadConfig
from isojax.rl import assemble
from isojax.rl.metrics import read_metrics
from isojax.rl.run_folder import RunFolder
from isojax.rl.tensorboard import PACKAGE

ASKED = {"metrics": {"tensorboard": True}}


def test_without_the_package_it_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(assemble, "open_task", lambda *given: None)
    with pytest.raises(
        BadConfig, match=r"metrics\.tensorboard: found true, and no package tensorboardX; .*pip install"
    ):
        assemble.assemble(run_config(**ASKED), config_folder=tmp_path, folder=RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def writers(monkeypatch):
    """The package's writer, as far as the sink uses it: where, from which step, and what was added."""
    opened = []

    class SummaryWriter:
        def __init__(self, logdir, *, purge_step):
            self.logdir, self.purge_step, self.added, self.flushed, self.closed = logdir, purge_step, {}, 0, False
            opened.append(self)

        def add_scalar(self, tag, value, step):
            self.added[tag, step] = value

        def flush(self):
            self.flushed += 1

        def close(self):
            self.closed = True

    module = types.ModuleType(PACKAGE)
    module.SummaryWriter = SummaryWriter
    module.__spec__ = importlib.util.spec_from_loader(PACKAGE, None)
    monkeypatch.setitem(sys.modules, PACKAGE, module)
    return opened


def test_every_number_of_every_step_is_a_scalar_and_metrics_are_written_all_the_same(tmp_path, writers):
    trainer = small_trainer(tmp_path / "run", run_config(**ASKED))
    trainer.run(show_progress=False)
    trainer.close()
    (writer,) = writers
    assert (writer.logdir, writer.purge_step) == (str(trainer.folder.tensorboard), 1)
    lines = read_metrics(trainer.folder.metrics)
    expected = {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if isinstance(value, int | float) and name != "step"
    }
    assert writer.added == expected
    assert {"reward_mean", "tokens_per_second_rollout", "memory_process_bytes"} <= {name for name, _ in writer.added}
    assert writer.flushed == len(lines) == 2
    assert writer.closed


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path, writers):
    first = small_trainer(tmp_path / "run", run_config(**ASKED))
    first.step()
    first.checkpoints.save(first.learner.state, first.progress)
    first.step()
    again = small_trainer(tmp_path / "run", run_config(**ASKED))
    again.resume()
    again.step()
    assert [writer.purge_step for writer in writers] == [1, 2]


def test_a_run_that_does_not_ask_for_it_opens_no_writer(tmp_path, writers):
    small_trainer(tmp_path / "run").step()
    assert writers == []


def test_the_package_itself_writes_event_files(tmp_path):
    pytest.importorskip(PACKAGE)
    trainer = small_trainer(tmp_path / "run", run_config(**ASKED))
    trainer.run(show_progress=False)
    trainer.close()
    (file,) = trainer.folder.tensorboard.glob("events.out.tfevents.*")
    assert b"reward_mean" in file.read_bytes()
