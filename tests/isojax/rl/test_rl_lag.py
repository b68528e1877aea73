"""Rollouts of one step before: who samples under which weights, what is compared with what, and exact resumes."""

import pytest
from reference_engine import ReferenceEngine, one_bit_off
from rl_samples import honest_report, leaf_bits, run_config, small_contract, small_policy, small_trainer

from contracts.errors import BadCheckpoint, DifferenceFound
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.metrics import read_metrics, reproducible

STEPS = 4


class RecordingEngine(ReferenceEngine):
    """Remembers under which weights each call sampled."""

    def __init__(self, *, beside=False):
        super().__init__(small_policy(), small_contract(), honest_report(small_contract()))
        self.runs_beside_trainer = beside
        self.digests = []

    def generate(self, *arguments, **keywords):
        self.digests.append(self.weight_digest)
        return super().generate(*arguments, **keywords)


def config(steps=STEPS, **train):
    return run_config(rollout={"lag": 1}, train={"steps": steps, **train})


def run(folder, engine, steps=STEPS):
    trainer = small_trainer(folder, config(steps), engine)
    trainer.run(show_progress=False)
    trainer.close()
    return trainer


def lines_of(trainer):
    return [reproducible(line) for line in read_metrics(trainer.folder.metrics)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("runs") / "lagged", RecordingEngine())


def test_every_rollout_but_the_first_is_sampled_under_the_weights_of_one_step_before(finished):
    lines = lines_of(finished)
    after = [line["weight_digest"] for line in lines]
    start = finished.engine.digests[0]
    assert finished.engine.digests == [start, start, *after[:-1]]
    assert len({start, *after}) == 5
    assert [line["rollout_version"] for line in lines] == [0, 0, 1, 2]
    assert [line["version_lag"] for line in lines] == [0, 1, 1, 1]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert [line["data_position"] for line in lines] == [2, 4, 6, 8]
    waiting = finished._waiting
    assert (waiting.step, waiting.policy_version, waiting.data_position) == (5, 3, 10)
    assert {completion.policy_version for completion in waiting.completions} == {3}


def test_each_rollout_has_the_bits_of_the_version_that_sampled_it(finished):
    for line in lines_of(finished):
        assert (line["tokens"], line["mismatch_tokens"], line["full_row_mismatches"]) == (24, 0, 0)
        assert line["full_rows"] == 5
    # What the check would miss if it were made with other weights than these.
    with pytest.raises(DifferenceFound, match="step 5"):
        finished.collector.check(finished._waiting, finished.learner.params)


def test_the_ratio_is_one_where_nothing_lies_between_and_moves_where_an_update_does(finished):
    first, *others = lines_of(finished)
    assert (first["first_ratio_off_one"], first["policy_kl"], first["policy_kl_k1"]) == (0, 0, 0)
    for line in others:
        assert line["first_ratio_off_one"] > 0
        assert line["policy_kl"] > 0


def test_sampling_beside_the_trainer_moves_no_bit(finished, tmp_path):
    other = run(tmp_path / "run", RecordingEngine(beside=True))
    main, *rest = other.engine.threads
    assert main == "MainThread"
    assert len(rest) == STEPS
    assert all(name.startswith("rollout") for name in rest)
    assert set(finished.engine.threads) == {"MainThread"}
    assert other.engine.digests == finished.engine.digests
    assert leaf_bits(other.learner.state) == leaf_bits(finished.learner.state)
    assert lines_of(other) == lines_of(finished)


def test_step_four_after_a_resume_at_two_equals_step_four_uninterrupted_bit_for_bit(finished, tmp_path):
    first = run(tmp_path / "run", RecordingEngine(), 2)
    second = small_trainer(tmp_path / "run", config(), RecordingEngine())
    second.resume()
    assert second.progress == first.progress
    second.run(show_progress=False)
    assert second.progress == finished.progress
    assert leaf_bits(second.learner.state) == leaf_bits(finished.learner.state)
    assert lines_of(second) == lines_of(finished)
    # Nothing is sampled again: the rollout of step 3 was in the checkpoint.
    assert second.engine.digests == finished.engine.digests[-2:]


def test_without_the_waiting_rollout_a_resumed_run_would_not_be_equal(finished, tmp_path):
    run(tmp_path / "run", RecordingEngine(), 2)
    second = small_trainer(tmp_path / "run", config(), RecordingEngine())
    second.resume()
    second._waiting = None
    second.run(show_progress=False)
    assert leaf_bits(second.learner.state) != leaf_bits(finished.learner.state)


@pytest.mark.parametrize("beside", [False, True])
def test_a_wrong_bit_in_a_lagged_rollout_stops_the_run_before_it_is_learned_from(tmp_path, beside):
    engine = RecordingEngine(beside=beside)
    engine.tamper = lambda found: [one_bit_off(found[0], 0), *found[1:]] if len(engine.calls) == 3 else found
    trainer = small_trainer(tmp_path / "run", config(), engine)
    with pytest.raises(DifferenceFound, match=r"step 3.*1 of 24 sampled tokens"):
        trainer.run(show_progress=False)
    trainer.close()
    assert [line["step"] for line in lines_of(trainer)] == [1]
    again = small_trainer(tmp_path / "run", config(), RecordingEngine())
    again.resume()
    assert (again.progress.step, again._waiting.step) == (1, 2)


def test_a_refused_update_waits_for_the_rollout_beside_it(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path / "run", config(), RecordingEngine(beside=True))

    def refuse(*arguments, **keywords):
        raise DifferenceFound(field="update", found=1, allowed=0, reason="A test.")

    monkeypatch.setattr(trainer.learner, "update", refuse)
    with pytest.raises(DifferenceFound, match="A test"):
        trainer.step()
    # Both calls had begun, and the engine is idle when the step has ended.
    assert len(trainer.engine.calls) == 2
    trainer.close()


def test_a_checkpoint_of_another_lag_is_refused(tmp_path):
    run(tmp_path / "run", RecordingEngine(), 1)
    other = small_trainer(tmp_path / "run", run_config(), RecordingEngine())
    with pytest.raises(BadCheckpoint, match="another lag"):
        other.resume()


@pytest.mark.parametrize("damage", ["deleted", "truncated", "emptied", "other"])
def test_a_damaged_waiting_rollout_is_refused(finished, tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(finished.learner.state, finished.progress, finished._waiting)
    (file,) = [path for path in (tmp_path / "4" / "waiting").rglob("*") if path.stat().st_size > 500]
    content = file.read_bytes()
    if damage == "deleted":
        file.unlink()
    else:
        file.write_bytes({"truncated": content[:-100], "emptied": b"", "other": b'{"rollout": {"step": 5}}'}[damage])
    with pytest.raises(BadCheckpoint, match="unreadable"):
        Checkpoints(tmp_path).waiting(4)
