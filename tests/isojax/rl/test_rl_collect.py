"""Dynamic sampling, what a checkpoint keeps of a rollout, entropies, and the first ratio of every algorithm."""

import dataclasses
import json

import numpy as np
import pytest
from rl_samples import completion, leaf_bits, run_config, small_engine, small_params, small_policy, small_trainer

from contracts.errors import DifferenceFound
from isojax.rl.collect import Collector, Rollout
from isojax.rl.data_order import example_indices
from isojax.rl.entropy import mean_entropy, row_entropy, sampled_entropy
from isojax.rl.metrics import read_metrics
from isojax.rl.mismatch import Mismatch
from isojax.rl.prompts import PromptEncoder
from isojax.rl.rollout import Sampling
from isojax.rl.rollout_record import rollout_from_json, rollout_to_json
from isojax.rl.tasks import Example, Task

DIGEST = "0" * 16


class ScriptedEngine:
    """Sample j of every prompt is the token j + 1, `length` times."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling, *, full_rows=0):
        self.calls.append((len(prompts), sampling.seed, full_rows))
        return [
            completion(tuple(prompt), (sample + 1,) * 2, prompt_index=index)
            for index, prompt in enumerate(prompts)
            for sample in range(sampling.samples)
        ]


def collector(tmp_path, equal_digits, **algorithm):
    """Over three prompts; those with a digit among `equal_digits` have the same reward whatever was sampled."""
    config = run_config(
        algorithm=algorithm, rollout={"prompts_per_step": 2, "group_size": 2, "max_tokens": 4}, check={"full_rows": 5}
    )
    examples = [Example(tokens=(0, digit), fields={"digit": digit}) for digit in (1, 2, 3)]

    def reward(example, tokens, text):
        return 0.5 if example.fields["digit"] in equal_digits else float(tokens[0])

    return Collector(
        config,
        policy=small_policy(),
        engine=ScriptedEngine(),
        task=Task(examples, reward, "scripted"),
        encoder=PromptEncoder(tmp_path),
        stop_token_ids=(),
        temperature=1.0,
    )


def digits(rollout, groups):
    return [rollout.completions[index].prompt_tokens[1] for index in groups[:, 0]]


def test_dapo_samples_the_next_prompts_in_the_place_of_groups_of_equal_rewards(tmp_path):
    """DAPO, section 3.2: the batch is filled with groups that have a gradient."""
    found = collector(tmp_path, {1}, name="dapo")
    # A position at which the first batch has the prompt without a gradient in it.
    position = next(place for place in range(0, 30, 2) if 0 in example_indices(3, place, 2, 3))
    rollout = found.sample(1, position, 7, DIGEST)
    assert rollout.groups.shape == (2, 2)
    assert 1 not in digits(rollout, rollout.groups)
    counts = [count for count, _, _ in found.engine.calls]
    assert counts[0] == 2
    assert len(counts) > 1
    assert rollout.data_position == position + sum(counts)
    # The sampled prompts are those of the data order, none skipped, each with its own number.
    order = example_indices(3, position, sum(counts), 3)
    assert digits(rollout, np.arange(len(rollout.completions)).reshape(-1, 2)) == [index + 1 for index in order]
    assert [item.prompt_index for item in rollout.completions[::2]] == list(range(sum(counts)))
    assert {item.policy_version for item in rollout.completions} == {7}
    # The calls have seeds of their own and a share of the full rows.
    assert len({seed for _, seed, _ in found.engine.calls}) == len(counts)
    assert [rows for _, _, rows in found.engine.calls] == [-(-5 * count // 2) for count in counts]


def test_dapo_drops_what_is_missing_when_its_tries_are_used_up(tmp_path):
    found = collector(tmp_path, {1, 2, 3}, name="dapo", sampling_tries=3)
    rollout = found.sample(1, 0, 0, DIGEST)
    assert rollout.groups.shape == (0, 2)
    assert [count for count, _, _ in found.engine.calls] == [2, 2, 2]
    assert (len(rollout.completions), rollout.data_position) == (12, 6)


@pytest.mark.parametrize("name", ["grpo", "reinforce"])
def test_the_others_keep_every_group(tmp_path, name):
    found = collector(tmp_path, {1, 2, 3}, name=name)
    assert found.sample(1, 0, 0, DIGEST).groups.tolist() == [[0, 1], [2, 3]]
    assert len(found.engine.calls) == 1


def test_a_step_without_a_group_to_learn_from_leaves_the_weights_as_they_are(tmp_path):
    trainer = small_trainer(tmp_path, run_config(algorithm={"name": "dapo", "sampling_tries": 2}))
    trainer.collector.task = dataclasses.replace(trainer.collector.task, reward=lambda *given: 1.0)
    metrics = trainer.step()
    assert leaf_bits(trainer.learner.params) == leaf_bits(small_params())
    assert (metrics.updates, metrics.kept_groups, metrics.sampled_groups, metrics.policy_version) == (0, 0, 4, 0)
    assert metrics.entropy_train is None
    # Also what is not learned from was compared.
    assert (metrics.tokens, metrics.mismatch_tokens) == (48, 0)
    assert read_metrics(trainer.folder.metrics)[0]["loss"] == 0


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce"},
        {"name": "reinforce", "baseline": "leave_one_out"},
        {"name": "grpo", "minibatches": 2},
        {"name": "dapo", "sampling_tries": 2},
    ],
)
def test_the_first_ratio_after_each_rollout_is_exactly_one_whatever_the_algorithm(tmp_path, algorithm):
    trainer = small_trainer(tmp_path, run_config(algorithm=algorithm))
    trainer.run(show_progress=False)
    lines = read_metrics(trainer.folder.metrics)
    assert len({line["weight_digest"] for line in lines}) == len(lines) == 2
    for line in lines:
        assert (line["first_ratio_off_one"], line["first_clip_fraction"], line["version_lag"]) == (0, 0, 0)
        assert line["mismatch_tokens"] == 0
        assert 0 < line["entropy"] <= np.log(16) + 1e-6
        assert line["entropy_sampled"] > 0
        if line["updates"] == 1:
            assert line["policy_kl"] == line["policy_kl_k1"] == line["clip_fraction"] == 0
    # And it is asserted: a log-probability that is off on its way to the loss stops the run.
    rollout = trainer.collector.sample(3, 6, 2, trainer.progress.weight_digest)
    wrong = rollout.completions[0].log_probs.copy()
    wrong.view(np.int32)[0] += 4
    off = dataclasses.replace(rollout.completions[0], log_probs=wrong)
    every = np.arange(len(rollout.completions)).reshape(-1, 4)
    off_rollout = dataclasses.replace(rollout, completions=(off, *rollout.completions[1:]), groups=every)
    with pytest.raises(DifferenceFound, match="ratio of the first minibatch"):
        trainer._update(off_rollout)


def test_a_rollout_comes_back_from_json_with_every_bit():
    values = np.array([-1.2345678, -1e-45, -0.0, -88.7], np.float32)
    items = (completion((0, 1), (3, 4, 5, 6), values, policy_version=7), completion((0, 2), (3,), [-0.1]))
    mismatch = Mismatch(5, frozenset({(0, 2), (1, 0)}), 3, 1, 1e-9, "first")
    rollout = Rollout(9, items, np.array([0.1, 1 / 3]), np.array([[0, 1]]), 7, DIGEST, 12, mismatch, 1.1)
    back = rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout))))
    for name in ("step", "policy_version", "weight_digest", "data_position", "mismatch", "entropy"):
        assert getattr(back, name) == getattr(rollout, name)
    assert back.rewards.tobytes() == rollout.rewards.tobytes()
    assert back.groups.tolist() == [[0, 1]]
    for one, other in zip(back.completions, items, strict=True):
        assert one.log_probs.dtype == np.float32
        assert one.log_probs.tobytes() == other.log_probs.tobytes()
        assert dataclasses.replace(one, log_probs=0) == dataclasses.replace(other, log_probs=0)


def test_the_entropy_that_comes_with_the_gradients_is_that_of_the_full_rows(tmp_path):
    # Full rows of every token that the one update sees.
    trainer = small_trainer(tmp_path, run_config(check={"full_rows": 24}))
    line = trainer.step()
    assert (line.full_rows, line.tokens, line.updates) == (24, 24, 1)
    assert line.entropy_train == pytest.approx(line.entropy, rel=1e-5)


def test_the_entropy_of_a_row_in_closed_form():
    assert row_entropy(np.log(np.full(8, 1 / 8, np.float32))) == pytest.approx(np.log(8))
    quarters = np.array([np.log(0.25), np.log(0.75), -np.inf], np.float32)
    assert row_entropy(quarters) == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3))
    one = completion((0,), (1, 1), [-1.0, -3.0], rows={0: quarters, 1: np.array([0, -np.inf, -np.inf], np.float32)})
    assert mean_entropy([one, completion((0,), (1,))]) == pytest.approx(row_entropy(quarters) / 2)
    assert mean_entropy([completion((0,), (1,))]) is None
    assert sampled_entropy([one, completion((0,), (1,), [-5.0])]) == pytest.approx(3.0)


def test_both_entropies_agree_where_every_row_is_there():
    engine = small_engine()
    engine.sync({name: value * 3 for name, value in small_params().items()})
    sampled = engine.generate([[0, 1], [0, 2]], Sampling(max_tokens=3, samples=64, seed=0), full_rows=10_000)
    assert all(len(item.rows) == len(item.tokens) for item in sampled)
    spread = np.std(np.concatenate([item.log_probs for item in sampled])) / np.sqrt(2 * 64 * 3)
    assert abs(sampled_entropy(sampled) - mean_entropy(sampled)) < 4 * spread
