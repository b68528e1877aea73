"""A tiny policy learns a task from random weights, with every bit checked on the way."""

import numpy as np
import pytest
from rl_samples import run_config, small_trainer

from isojax.rl.metrics import read_metrics


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_last_twenty_steps_beat_the_first_twenty_by_four_standard_errors(tmp_path, seed):
    config = run_config(
        policy={"random_seed": seed},
        rollout={"prompts_per_step": 4, "group_size": 8, "max_tokens": 2},
        train={"steps": 50, "checkpoint_every": 50},
    ).model_copy(update={"seed": seed})
    trainer = small_trainer(tmp_path, config)
    trainer.run(show_progress=False)
    lines = read_metrics(trainer.folder.metrics)
    rewards = np.array([line["reward_mean"] for line in lines])
    before, after = rewards[:20], rewards[-20:]
    error = np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / 20)
    assert after.mean() - before.mean() >= 4 * error
    assert sum(line["mismatch_tokens"] + line["full_row_mismatches"] for line in lines) == 0
    assert sum(line["tokens"] for line in lines) == 50 * 4 * 8 * 2
