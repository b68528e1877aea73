"""A tiny policy learns a task from random weights on real vLLM rollouts, with every bit checked on the way."""

import numpy as np
import pytest
from rl_samples import run_config, small_params, small_policy, small_trainer

import isojax
from isojax.rl.metrics import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.long_file(40)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning") / "policy"
    isojax.export_policy(folder, small_policy(), small_params(), {})
    engine = isojax.open_engine("vllm", folder, kv_cache_bytes=8 << 20, page_size=16, max_step_tokens=64)
    yield engine
    engine.close()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_last_twenty_steps_beat_the_first_twenty_by_four_standard_errors(engine, tmp_path, seed):
    config = run_config(
        policy={"random_seed": seed},
        rollout={"prompts_per_step": 4, "group_size": 8, "max_tokens": 2},
        train={"steps": 50, "checkpoint_every": 50},
    ).model_copy(update={"seed": seed})
    trainer = small_trainer(tmp_path, config, engine)
    trainer.run(show_progress=False)
    lines = read_metrics(trainer.folder.metrics)
    rewards = np.array([line["reward_mean"] for line in lines])
    before, after = rewards[:20], rewards[-20:]
    error = np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / 20)
    print(f"seed {seed}: {before.mean():.3f} to {after.mean():.3f}, standard error {error:.3f}")
    assert after.mean() - before.mean() >= 4 * error
    assert sum(line["mismatch_tokens"] + line["full_row_mismatches"] for line in lines) == 0
    assert sum(line["tokens"] for line in lines) == 50 * 4 * 8 * 2
