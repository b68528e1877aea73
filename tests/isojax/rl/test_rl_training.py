"""Whole training steps: what is asserted, what is refused, what resumes exactly, what is left behind."""

import dataclasses

import jax
import numpy as np
import pytest
from reference_engine import one_bit_off
from rl_samples import (
    completion,
    copy_task,
    honest_report,
    run_config,
    small_contract,
    small_engine,
    small_params,
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
from isojax.rl.advantages import group_advantages
from isojax.rl.checkpoint import Checkpoints
from isojax.rl.learner import Learner
from isojax.rl.metrics import read_metrics
from isojax.rl.rollout import Sampling
from isojax.weights.digest import digest

DESIGN_FIELDS = {
    *("step", "reward_mean", "tokens", "mismatch_tokens", "mismatch_max_abs", "full_rows", "full_row_mismatches"),
    *("kl", "clip_fraction", "seconds_rollout", "seconds_train", "seconds_sync", "weight_digest", "numerical_policy"),
}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def small_learner(**algorithm):
    config = run_config(algorithm=algorithm)
    return Learner(
        small_policy(),
        small_params(),
        optimizer=config.optimizer,
        algorithm=config.algorithm,
        temperature=1.0,
        micro_batch_tokens=64,
    )


@pytest.fixture(scope="module")
def rollout():
    engine = small_engine()
    engine.sync(small_params())
    return engine.generate([[0, 1], [0, 2]], Sampling(max_tokens=3, samples=4, seed=5))


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
        assert line["policy_kl"] == 0


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
    assert bits(second.learner.state) == bits(finished.learner.state)
    assert bits(second.learner.params) == bits(finished.learner.params)

    def without_seconds(trainer):
        return [{key: value for key, value in line.items() if not key.startswith("seconds_")}
                for line in read_metrics(trainer.folder.metrics)]  # fmt: skip

    assert without_seconds(second) == without_seconds(finished)


def test_without_the_optimizers_moments_a_resumed_run_would_not_be_equal(finished, tmp_path):
    """What the test above would miss if it could not fail."""
    config = run_config(train={"steps": 4}, algorithm={"kl_weight": 0.1})
    trainer = small_trainer(tmp_path / "run", config)
    trainer.step()
    trainer.step()
    fresh = small_trainer(tmp_path / "other", config)
    trainer.learner.restore(trainer.learner.state._replace(optimizer=fresh.learner.state.optimizer))
    trainer.run(show_progress=False)
    assert bits(trainer.learner.params) != bits(finished.learner.params)


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


def test_the_ratio_is_asserted_in_the_learner_itself(rollout):
    wrong = [one_bit_off(rollout[0], 1), *rollout[1:]]
    learner = small_learner()
    with pytest.raises(DifferenceFound, match="ratio of the first minibatch"):
        learner.update(wrong, np.ones(8, np.float32), None, require_exact=True)
    assert bits(learner.params) == bits(small_params())


def test_minibatches_and_epochs_are_updates_of_their_own_and_later_ratios_move(rollout):
    learner = small_learner(minibatches=2, epochs=2)
    advantages = group_advantages(np.arange(8.0), 4)
    result = learner.update(rollout, advantages, None, require_exact=True)
    assert result.updates == 4
    assert (result.first_ratio_off_one, result.first_clip_fraction) == (0, 0)
    assert result.policy_kl > 0
    # trainer_fwd is compared where no weight had moved yet: the first minibatch, one prompt's group.
    assert result.mismatch.tokens == 12


def test_gradients_of_micro_batches_add_up(rollout):
    """Sixteen completions fill two micro-batches; each half alone weighs its tokens twice as much."""
    advantages = group_advantages(np.arange(16.0), 4)
    learner = small_learner()
    both = learner._minibatch([*rollout, *rollout], list(range(16)), advantages, None)
    halves = [learner._minibatch(rollout, list(range(8)), part, None) for part in np.split(advantages, 2)]
    assert both.parts.tokens == sum(half.parts.tokens for half in halves) == 48
    for name, gradient in both.gradients.items():
        expected = (np.asarray(halves[0].gradients[name]) + np.asarray(halves[1].gradients[name])) / 2
        # The micro-batches are cut elsewhere, and each one's gradient is a bfloat16 value: eight bits of mantissa.
        np.testing.assert_allclose(gradient, expected, atol=float(np.abs(expected).max()) * 2**-6, err_msg=name)


def test_every_parameter_receives_a_gradient(rollout):
    part = small_learner()._minibatch(rollout, list(range(8)), group_advantages(np.arange(8.0), 4), None)
    assert {name for name, value in part.gradients.items() if np.abs(value).max() > 0} == set(small_params())


def test_master_weights_keep_what_bfloat16_would_lose(rollout):
    learner = small_learner()
    learner._optimizer = learner._optimizer.model_copy(update={"learning_rate": 1e-6})
    master = bits(learner.state.master)
    for _ in range(2):
        learner.update(rollout, group_advantages(np.arange(8.0), 4), None, require_exact=False)
    assert bits(learner.state.master) != master
    # 1e-6 is far below a bfloat16 ulp of most weights, so nearly all copies still round to where they were.
    unchanged = [
        np.mean(np.asarray(learner.params[name]) == np.asarray(value)) for name, value in small_params().items()
    ]
    assert min(unchanged) > 0.9
    assert all(value.dtype == np.float32 for value in learner.state.master.values())


def test_an_update_that_is_not_finite_is_refused_and_not_applied(rollout):
    learner = small_learner()
    with pytest.raises(NonFiniteLogits, match="loss"):
        learner.update(rollout, np.full(8, np.nan, np.float32), None, require_exact=True)
    assert bits(learner.params) == bits(small_params())


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
    assert bits(again.learner.params) == bits(trainer.learner.params)


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
    for file in (tmp_path / "checkpoints" / "1" / "state").rglob("*"):
        if file.is_file() and "ocdbt" not in file.name and file.stat().st_size > 200:
            file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(BadCheckpoint, match="unreadable"):
        Checkpoints(tmp_path / "checkpoints").restore(1, finished.learner.state)


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
    prompts = {completion_.prompt_tokens for completion_ in finished._generate(finished._examples())}
    assert prompts <= {example.tokens for example in copy_task().examples}
    assert completion((0,), (1,)).tokens == (1,)
