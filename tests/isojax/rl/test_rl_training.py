"""Whole training steps: what is asserted, what is refused, what resumes exactly, what is left behind."""

import dataclasses
import os
import signal

import numpy as np
import pytest
from reference_engine import one_bit_off
from rl_samples import (
    completion,
    copy_task,
    honest_report,
    leaf_bits,
    run_config,
    small_contract,
    small_engine,
    small_policy,
    small_trainer,
)

from contracts.errors import (
    BadCheckpoint,
    DifferenceFound,
    HandshakeRefused,
    NonFiniteLogits,
    WeightDigestMismatch,
)
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.interrupts import finishing_first
from isojax.rl.metrics import read_metrics, reproducible
from isojax.weights.digest import digest

pytestmark = pytest.mark.long_file(30)

DESIGN_FIELDS = {
    *("step", "reward_mean", "tokens", "mismatch_tokens", "mismatch_max_abs", "full_rows", "full_row_mismatches"),
    *("kl", "clip_fraction", "seconds_rollout", "seconds_train", "seconds_sync", "weight_digest", "numerical_policy"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four steps with the reference policy's KL term, checkpointed after each."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    trainer = small_trainer(folder, run_config(train={"steps": 4}, algorithm={"kl_weight": 0.1}))
    trainer.run(show_progress=False)
    trainer.close()
    return trainer


def test_a_run_leaves_metrics_and_a_report_behind(finished):
    lines = read_metrics(finished.folder.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert set(lines[0]) >= DESIGN_FIELDS
    assert all(line["tokens"] == 24 and line["full_rows"] == 5 for line in lines)
    assert all(
        line["mismatch_tokens"] == line["full_row_mismatches"] == line["mismatch_max_abs"] == 0 for line in lines
    )
    assert lines[-1]["weight_digest"] == digest(finished.learner.params) == finished.engine.weight_digest
    assert len({line["weight_digest"] for line in lines}) == 4
    assert lines[0]["numerical_policy"] == small_contract().identities.numerical_policy
    page = finished.folder.report.read_text()
    assert "Equal bits" in page
    assert "0 of 96 sampled tokens and 0 of 20 full log-probability rows" in page


def test_after_each_rollout_the_ratio_is_exactly_one_and_nothing_is_clipped(finished):
    for line in read_metrics(finished.folder.metrics):
        assert line["first_ratio_off_one"] == 0
        assert line["first_clip_fraction"] == 0
        assert line["policy_kl"] == line["policy_kl_k1"] == 0


def test_the_kl_to_the_frozen_reference_starts_at_zero_and_grows(finished):
    kl = [line["kl"] for line in read_metrics(finished.folder.metrics)]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[3]


def test_every_request_has_a_seed_of_its_own_step(finished):
    seeds = [call.seed for call in finished.engine.calls]
    assert len(set(seeds)) == 4


def test_step_four_after_a_resume_at_two_equals_step_four_uninterrupted_bit_for_bit(finished, tmp_path):
    changes = {"algorithm": {"kl_weight": 0.1}}
    first = small_trainer(tmp_path / "run", run_config(train={"steps": 2}, **changes))
    first.run(show_progress=False)
    first.close()
    second = small_trainer(tmp_path / "run", run_config(train={"steps": 4}, **changes))
    second.resume()
    assert second.progress == first.progress
    second.run(show_progress=False)
    assert second.progress == finished.progress
    assert leaf_bits(second.learner.state) == leaf_bits(finished.learner.state)
    assert leaf_bits(second.learner.params) == leaf_bits(finished.learner.params)

    lines, expected = (list(map(reproducible, read_metrics(one.folder.metrics))) for one in (second, finished))
    assert lines == expected


def test_without_the_optimizers_moments_a_resumed_run_would_not_be_equal(finished, tmp_path):
    """What the test above would miss if it could not fail."""
    config = run_config(train={"steps": 4}, algorithm={"kl_weight": 0.1})
    trainer = small_trainer(tmp_path / "run", config)
    trainer.step()
    trainer.step()
    fresh = small_trainer(tmp_path / "other", config)
    trainer.learner.restore(trainer.learner.state._replace(optimizer=fresh.learner.state.optimizer))
    trainer.run(show_progress=False)
    assert leaf_bits(trainer.learner.params) != leaf_bits(finished.learner.params)


def test_an_engine_that_reports_one_wrong_bit_stops_the_run_before_a_weight_moves(tmp_path):
    engine = small_engine()
    engine.tamper = lambda completions: [one_bit_off(completions[0], 0), *completions[1:]]
    trainer = small_trainer(tmp_path / "run", engine=engine)
    before = digest(trainer.learner.params)
    with pytest.raises(DifferenceFound, match="1 of 24 sampled tokens"):
        trainer.run(show_progress=False)
    assert digest(trainer.learner.params) == before
    assert read_metrics(trainer.folder.metrics) == []
    assert trainer.folder.report.exists()


def test_recorded_mismatches_are_written_down_and_the_run_goes_on(tmp_path):
    engine = small_engine()
    engine.tamper = lambda completions: [one_bit_off(completions[0], 0), *completions[1:]]
    trainer = small_trainer(tmp_path / "run", run_config(check={"on_mismatch": "record"}), engine)
    trainer.run(show_progress=False)
    lines = read_metrics(trainer.folder.metrics)
    assert [line["mismatch_tokens"] for line in lines] == [1, 1]
    assert all(0 < line["mismatch_max_abs"] < 1e-5 for line in lines)
    assert "Different bits" in trainer.folder.report.read_text()


def test_an_engine_with_other_weights_is_refused(tmp_path):
    engine = small_engine()
    engine.tamper = lambda completions: [dataclasses.replace(item, weight_digest="0" * 16) for item in completions]
    with pytest.raises(WeightDigestMismatch):
        small_trainer(tmp_path / "run", engine=engine).step()

    class Forgetful(type(engine)):
        def sync(self, params):
            super().sync(params)
            return "0" * 16

    stale = Forgetful(small_policy(), small_contract(), honest_report(small_contract()))
    with pytest.raises(WeightDigestMismatch, match="after sync"):
        small_trainer(tmp_path / "other", engine=stale)


def test_an_engine_of_another_contract_is_refused_before_anything_is_sampled(tmp_path):
    engine = small_engine()
    engine._report = honest_report(small_contract()).model_copy(update={"kv_cache_dtype": "fp8_e4m3"})
    with pytest.raises(HandshakeRefused, match="kv_cache_dtype"):
        small_trainer(tmp_path / "run", engine=engine)
    assert engine.calls == []
    assert engine.params == {}


def test_ctrl_c_keeps_the_last_finished_step(tmp_path):
    engine = small_engine()

    def interrupt(completions):
        if len(engine.calls) == 3:
            raise KeyboardInterrupt
        return completions

    engine.tamper = interrupt
    config = run_config(train={"steps": 9, "checkpoint_every": 9})
    trainer = small_trainer(tmp_path / "run", config, engine)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(show_progress=False)
    trainer.close()
    assert trainer.checkpoints.latest() == 2
    assert [line["step"] for line in read_metrics(trainer.folder.metrics)] == [1, 2]
    again = small_trainer(tmp_path / "run", config)
    again.resume()
    assert again.progress.step == 2
    assert leaf_bits(again.learner.params) == leaf_bits(trainer.learner.params)


def test_ctrl_c_in_an_update_waits_for_the_step_and_then_keeps_it(tmp_path, monkeypatch, capsys):
    config = run_config(train={"steps": 9, "checkpoint_every": 9})
    trainer = small_trainer(tmp_path / "run", config)
    update = trainer.learner.update

    def interrupted(*arguments, **keywords):
        result = update(*arguments, **keywords)
        if trainer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(trainer.learner, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(show_progress=False)
    trainer.close()
    assert "once this step is finished" in capsys.readouterr().err
    assert trainer.checkpoints.latest() == 3
    again = small_trainer(tmp_path / "run", config)
    again.resume()
    assert leaf_bits(again.learner.params) == leaf_bits(trainer.learner.params)


def test_a_second_ctrl_c_does_not_wait():
    def press_twice():
        with finishing_first():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("the second one waited as well")

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_update_that_is_refused_keeps_the_step_before_it(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path / "run", run_config(train={"steps": 9, "checkpoint_every": 9}))
    rewards = trainer.collector._rewards

    def spoil(*given):
        return rewards(*given) * (np.nan if trainer.progress.step else 1)

    monkeypatch.setattr(trainer.collector, "_rewards", spoil)
    with pytest.raises(NonFiniteLogits):
        trainer.run(show_progress=False)
    assert trainer.checkpoints.latest() == 1


def test_a_checkpoint_that_was_not_finished_does_not_count(finished, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(finished.learner.state, dataclasses.replace(finished.progress, step=1))
    # What orbax leaves behind when it is killed while it writes.
    (tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path / "checkpoints").latest() == 1


def test_damaged_and_foreign_checkpoints_are_refused(finished, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(BadCheckpoint, match="no complete checkpoint"):
        checkpoints.restore(1, finished.learner.state)
    checkpoints.save(finished.learner.state, dataclasses.replace(finished.progress, step=1))
    other = finished.learner.state._replace(master={"another": np.zeros(3, np.float32)})
    with pytest.raises(BadCheckpoint, match="another"):
        checkpoints.restore(1, other)


@pytest.mark.parametrize("damage", ["zeros", "truncated", "flipped", "deleted"])
def test_a_damaged_checkpoint_is_refused(finished, tmp_path, damage):
    Checkpoints(tmp_path).save(finished.learner.state, dataclasses.replace(finished.progress, step=1))
    arrays = [file for file in (tmp_path / "1" / "state").rglob("d/*") if file.stat().st_size > 200]
    assert arrays
    for file in arrays:
        content = file.read_bytes()
        if damage == "deleted":
            file.unlink()
        else:
            changed = {"zeros": bytes(len(content)), "truncated": content[: len(content) // 2]}
            file.write_bytes(changed.get(damage, bytes(byte ^ 255 for byte in content)))
    with pytest.raises(BadCheckpoint, match="unreadable"):
        Checkpoints(tmp_path).restore(1, finished.learner.state)


def test_a_run_cannot_resume_under_another_seed_contract_or_reference(finished, tmp_path):
    folder = tmp_path / "run"
    trainer = small_trainer(folder)
    with pytest.raises(BadCheckpoint, match="no complete checkpoint"):
        trainer.resume()
    for field, value in (("numerical_policy", "0" * 64), ("seed", 4), ("reference_digest", "0" * 16)):
        trainer.checkpoints.save(
            trainer.learner.state,
            dataclasses.replace(trainer.progress, step=trainer.progress.step + 1, **{field: value}),
        )
        with pytest.raises(BadCheckpoint, match=field):
            trainer.resume()
        trainer.checkpoints._manager.delete(1)


def test_a_report_needs_nothing_from_outside(finished):
    page = finished.folder.report.read_text()
    assert "<script" not in page
    for reference in ("http://", "https://", "src=", "@import", "url("):
        assert reference not in page


def test_prompts_reach_the_engine_as_the_tasks_tokens(finished):
    rollout = finished.collector.sample(1, 0, 0, finished.engine.weight_digest)
    prompts = {completion_.prompt_tokens for completion_ in rollout.completions}
    assert prompts <= {example.tokens for example in copy_task().examples}
    assert completion((0,), (1,)).tokens == (1,)
