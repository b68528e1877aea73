"""Real vLLM in a process of its own samples the next rollout while the trainer learns from this one."""

import pytest
from rl_samples import run_config, small_params, small_policy, small_trainer

import isojax
from isojax.rl.metrics import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long_file(40)]


def test_a_lagged_run_beside_real_vllm_agrees_in_every_bit(tmp_path):
    isojax.export_policy(tmp_path / "policy", small_policy(), small_params(), {})
    settings = {"kv_cache_bytes": 8 << 20, "page_size": 16, "max_step_tokens": 64, "separate_process": True}
    engine = isojax.open_engine("vllm", tmp_path / "policy", **settings)
    trainer = small_trainer(tmp_path / "run", run_config(rollout={"lag": 1}, train={"steps": 2}), engine)
    try:
        assert engine.runs_beside_trainer
        trainer.run(show_progress=False)
    finally:
        trainer.close()
    lines = read_metrics(trainer.folder.metrics)
    assert [line["version_lag"] for line in lines] == [0, 1]
    assert all(line["tokens"] == 24 and line["full_rows"] >= 5 for line in lines)
    assert sum(line["mismatch_tokens"] + line["full_row_mismatches"] for line in lines) == 0
    assert len({line["weight_digest"] for line in lines}) == 2
