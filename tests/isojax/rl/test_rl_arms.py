"""The baseline arm: the same trainer without regions, never taken for the exact one."""

import json
from functools import cache

import numpy as np
import pytest
from rl_samples import raw_run, run_config, small_contract, small_engine, small_params, small_policy, small_trainer

from contracts.errors import BadConfig, NonFiniteLogits
from isojax.policy.native import native_policy
from isojax.rl.config_file import parse_config
from isojax.rl.metrics import read_metrics
from isojax.rl.optimizer import compute_copies
from isojax.rl.report import run_summary
from isojax.rl.rollout import open_engine
from isojax.rl.run_folder import RunFolder

pytestmark = pytest.mark.long_file(30)

NATIVE = {"policy": {"arm": "native"}, "check": {"on_mismatch": "record", "full_rows": 5}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A native run of three steps, whose engine runs the regions: another stack, as a stock engine is."""
    folder = tmp_path_factory.mktemp("runs") / "small-native"
    trainer = _trainer(folder, run_config(train={"steps": 3}, **NATIVE))
    trainer.run(show_progress=False)
    trainer.close()
    return trainer


@cache
def small_native():
    """The small policy in the native arm, one for all tests here: what is compiled for it is compiled once."""
    return native_policy(small_policy(), 8)


def _trainer(folder, config, **changes):
    return small_trainer(folder, config, **{"policy": small_native(), "contract": None} | changes)


def test_everything_that_a_native_run_leaves_says_so(finished):
    lines = read_metrics(finished.folder.metrics)
    assert {line["arm"] for line in lines} == {"native"}
    assert {line["numerical_policy"] for line in lines} == {"native"}
    assert {line["entropy_train"] for line in lines} == {None}
    page = finished.folder.report.read_text()
    assert "<title>isojax run small-native (native arm: no contract)</title>" in page
    assert "<b>Native arm.</b> No contract is claimed." in page
    assert "Equal bits" not in page
    assert run_summary(finished.folder).startswith("native arm: ")
    assert finished.progress.numerical_policy == "native"
    first = next(iter(lines))
    assert first["tokens"] == 24
    assert first["full_rows"] == 0


def test_an_exact_run_says_nothing_of_it(tmp_path):
    trainer = small_trainer(tmp_path / "run", run_config(train={"steps": 1}))
    trainer.run(show_progress=False)
    assert [line["arm"] for line in read_metrics(trainer.folder.metrics)] == ["exact"]
    assert "native" not in trainer.folder.report.read_text().split("<pre", 1)[0]
    assert "native" not in run_summary(trainer.folder)


def test_its_drift_is_counted_and_it_learns_all_the_same(finished):
    lines = read_metrics(finished.folder.metrics)
    assert sum(line["mismatch_tokens"] for line in lines) > 0
    assert 0 < max(line["mismatch_max_abs"] for line in lines) < 0.1
    assert sum(line["first_ratio_off_one"] for line in lines) > 0
    assert len({line["weight_digest"] for line in lines}) == 3


def test_a_native_run_resumes_exactly(finished, tmp_path):
    first = _trainer(tmp_path / "run", run_config(train={"steps": 2}, **NATIVE))
    first.run(show_progress=False)
    first.close()
    second = _trainer(tmp_path / "run", run_config(train={"steps": 3}, **NATIVE))
    second.resume()
    second.run(show_progress=False)
    assert second.progress == finished.progress


def test_the_folder_of_a_native_run_has_a_name_of_its_own():
    assert run_config().run_name == "small"
    assert run_config(**NATIVE).run_name == "small-native"


def test_a_native_run_cannot_stop_at_a_mismatch():
    with pytest.raises(BadConfig, match=r"policy\.arm = 'native' needs check\.on_mismatch = 'record': stock stacks"):
        run_config(policy={"arm": "native"})
    with pytest.raises(BadConfig, match=r"policy\.arm"):
        run_config(policy={"arm": "plain"})


def test_a_run_stays_in_its_arm(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(run_config(check={"on_mismatch": "record"}))
    with pytest.raises(BadConfig, match=r"policy\.arm: found native; allowed: exact"):
        folder.require_same_config(run_config(**NATIVE))


@pytest.mark.parametrize(
    ("arm", "plain", "contract"),
    [("native", False, False), ("native", True, True), ("exact", True, True), ("exact", False, False)],
)
def test_policy_contract_and_configuration_are_of_one_arm(tmp_path, arm, plain, contract):
    config = run_config(policy={"arm": arm}, check={"on_mismatch": "record"})
    with pytest.raises(BadConfig, match=r"policy\.arm: found .*never mixed"):
        small_trainer(
            tmp_path / "run",
            config,
            policy=small_native() if plain else small_policy(),
            contract=small_contract() if contract else None,
        )


def test_the_native_arm_asks_its_engine_for_no_contract(tmp_path):
    class Silent(type(small_engine())):
        def report(self):
            raise AssertionError("asked")

    _trainer(tmp_path / "run", run_config(**NATIVE), engine=Silent(small_policy(), None))


def test_a_nan_of_the_native_arm_is_refused_and_names_no_region(tmp_path):
    engine = small_engine()

    def spoil(completions):
        completions[0].log_probs[1] = np.nan
        return completions

    engine.tamper = spoil
    trainer = _trainer(tmp_path / "run", run_config(**NATIVE), engine=engine)
    with pytest.raises(NonFiniteLogits, match=r"request 0 .*region unknown \(the native arm has none\)"):
        trainer.step()


def test_both_arms_round_master_weights_alike():
    master = {name: value.astype("float32") * np.float32(1.001) for name, value in small_params().items()}
    exact, plain = (compute_copies(master, policy) for policy in (small_policy(), small_native()))
    assert all(np.array_equal(exact[name], plain[name]) for name in master)


def test_an_engine_without_a_baseline_is_refused(monkeypatch):
    class Only:
        pass

    monkeypatch.setattr("isojax.rl.rollout.engine_class", lambda name: Only)
    with pytest.raises(
        BadConfig, match=r"policy\.arm: found native; allowed: exact. The engine 'only' has no baseline"
    ):
        open_engine("only", "folder", arm="native")


def test_the_arm_is_part_of_the_configuration_that_a_run_keeps(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(parse_config(raw_run(**NATIVE), source="test"))
    assert json.loads(folder.config.read_text())["policy"]["arm"] == "native"
