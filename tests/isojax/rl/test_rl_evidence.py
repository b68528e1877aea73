"""Bisect, drift and gates: they see what is there, and say when nothing is."""

import dataclasses
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rl_samples import small_engine, small_params, small_policy

from contracts.errors import BadConfig, DifferenceFound, EmptyBatch
from isojax.evidence import cpu_gates, gates
from isojax.evidence.bisect import find_parting, load_outputs, save_outputs
from isojax.evidence.capture import RegionOutput, capture_forward, first_non_finite
from isojax.evidence.drift import LogProbs, load_log_probs, measure, sample, save_log_probs, score_like
from isojax.evidence.executors import open_executor
from isojax.evidence.gates import Gate, GateSuite, run_gates, select_gates, select_suites
from isojax.policy import pack
from isojax.rl.report import render
from pallas_kernels.attention.spec import DEFAULT_SPLIT

pytestmark = pytest.mark.long_file(90)


def batch():
    return pack([(1, 2, 3, 4, 5)], length_multiple=64)


@pytest.fixture(scope="module")
def outputs():
    return capture_forward(small_policy(), small_params(), batch())


def changed(outputs, index, change):
    """A copy in which `change` was applied to the first result of one call."""
    result = outputs[index].results[0].copy()
    change(result)
    copy = list(outputs)
    copy[index] = dataclasses.replace(outputs[index], results=(result, *outputs[index].results[1:]))
    return copy


def test_a_capture_holds_every_region_of_every_layer_in_order(outputs):
    layer = [
        "matmul",
        "qk_norm_rope",
        "attention",
        "matmul",
        "add_rms_norm",
        "gated_matmul",
        "matmul",
        "add_rms_norm",
    ]
    assert [output.region for output in outputs] == ["rms_norm", *layer, "log_prob_rows"]
    assert [output.layer for output in outputs] == [None, *[0] * len(layer), None]


def test_captured_rows_are_the_policys_own(outputs):
    rows = small_policy().log_prob_rows(small_params(), batch(), np.arange(64))
    assert np.array_equal(np.asarray(rows).view(np.int32), outputs[-1].results[0].view(np.int32))


def test_regions_alone_and_the_whole_forward_agree_in_every_bit(outputs):
    alone = open_executor("regions")(Path(), small_policy(), small_params(), batch())
    assert find_parting(outputs, alone) is None


def test_bisect_names_the_first_difference_and_not_the_largest(outputs):
    """RL-Kernel#230: aligning the module with the largest error does not move the drift."""
    one_ulp = changed(outputs, 3, lambda result: result.view(np.uint16).__setitem__((2, 1, 3), 0))
    both = changed(one_ulp, len(outputs) - 1, lambda result: result.__iadd__(50.0))
    found = find_parting(outputs, both)
    assert (found.region, found.layer, found.row, found.index, found.elements) == ("attention", 0, 2, 3, 1)
    assert (found.largest, found.largest_difference) == ("log_prob_rows", pytest.approx(50.0, rel=1e-3))
    assert "region attention, layer 0, row 2" in str(found)


def test_nan_counts_as_the_largest_difference(outputs):
    found = find_parting(outputs, changed(outputs, 1, lambda result: result.__setitem__((4, 0), np.nan)))
    assert (found.row, found.largest_difference) == (4, float("inf"))


def test_bisect_refuses_two_runs_that_are_not_of_one_forward(outputs):
    with pytest.raises(BadConfig, match="call 9 of the two"):
        find_parting(outputs, outputs[:-1])
    with pytest.raises(BadConfig, match="call 0"):
        find_parting(outputs, [RegionOutput("matmul", None, outputs[0].results), *outputs[1:]])


def test_a_saved_run_comes_back_with_every_bit(outputs, tmp_path):
    save_outputs(tmp_path / "run.npz", outputs, [1, 2, 3])
    assert find_parting(outputs, load_outputs(tmp_path / "run.npz", [1, 2, 3])) is None
    with pytest.raises(BadConfig, match=r"tokens: found .1, 2, 3.; allowed: .1, 2."):
        load_outputs(tmp_path / "run.npz", [1, 2])
    (tmp_path / "other.npz").write_bytes(b"PK")
    with pytest.raises(BadConfig, match="--save"):
        load_outputs(tmp_path / "other.npz", [])


def test_a_damaged_saved_run_is_refused(tmp_path):
    output = RegionOutput("cast", None, (np.ones((64, 8), np.float32),))
    save_outputs(tmp_path / "run.npz", [output], [1])
    whole = (tmp_path / "run.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (b"", b"garbage", b"PK\x03\x04garbage", whole[: len(whole) // 2], bytes(flipped)):
        (tmp_path / "run.npz").write_bytes(content)
        with pytest.raises(BadConfig, match="no region outputs"):
            load_outputs(tmp_path / "run.npz", [1])


def test_the_first_region_that_is_not_finite_is_named(outputs):
    assert first_non_finite(outputs) is None
    params = small_params()
    params["layers.down"] = params["layers.down"].at[0, 3, 5].set(jnp.nan)
    output, row = first_non_finite(capture_forward(small_policy(), params, batch()))
    assert (str(output), row) == ("matmul of layer 0", 0)
    with pytest.raises(BadConfig, match="trainer"):
        open_executor("trainr")


def log_probs(*values, tokens=None):
    return LogProbs(
        tuple(tuple(range(len(item))) for item in values) if tokens is None else tokens,
        tuple(np.array(item, np.float32) for item in values),
    )


def test_drift_counts_bits_and_measures_distances():
    found = measure(log_probs([-1.0, -2.0], [-3.0]), log_probs([-1.0, -2.5], [-2.0]))
    assert (found.tokens, found.different, found.max_abs) == (3, 2, 1.0)
    assert (found.worst_sequence, found.worst_token) == (1, 0)
    assert found.mean_abs == pytest.approx(0.5)
    assert found.mean_signed == pytest.approx(0.5 / 3)
    assert found.kl == pytest.approx((np.exp(-0.5) + 0.5 - 1 + np.exp(1) - 2) / 3)
    assert (found.ratio_low, found.ratio_high) == (pytest.approx(np.exp(-0.5)), pytest.approx(np.e))


def test_one_ulp_of_drift_is_drift():
    one = np.array([-1.0], np.float32)
    found = measure(log_probs(one), log_probs(np.nextafter(one, np.float32(0))))
    assert found.different == 1
    assert found.max_abs < 1e-7


def test_drift_refuses_other_tokens_and_nothing():
    with pytest.raises(BadConfig, match="sequence 1"):
        measure(log_probs([0], [0], tokens=((1,), (2,))), log_probs([0], [0], tokens=((1,), (3,))))
    with pytest.raises(BadConfig, match="numbers of sequences"):
        measure(log_probs([0.0]), log_probs([0.0], [0.0]))
    with pytest.raises(EmptyBatch):
        measure(log_probs(), log_probs())


def test_a_dump_brings_every_float32_back_and_the_trainer_scores_what_an_engine_sampled(tmp_path):
    engine = small_engine()
    engine.sync(small_params())
    sampled = sample(engine, [[1, 2], [3, 4]], max_tokens=3, seed=0)
    save_log_probs(tmp_path / "dump.jsonl", sampled)
    loaded = load_log_probs(tmp_path / "dump.jsonl")
    assert measure(sampled, loaded).different == 0
    assert measure(loaded, score_like(loaded, small_policy(), small_params(), capacity=64)).different == 0
    with pytest.raises(EmptyBatch):
        score_like(log_probs(), small_policy(), small_params())
    with pytest.raises(BadConfig, match="whole history"):
        score_like(log_probs([0.0]), small_policy(), small_params())


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "3", "[" * 100_000, '{"tokens": [1]}', '{"tokens": [1], "log_probs": [1, 2]}'),
        '{"tokens": [1.9], "log_probs": [-1]}',
        '{"tokens": [1e999], "log_probs": [-1]}',
        '{"tokens": [99999999999], "log_probs": [-1]}',
        '{"tokens": "12", "log_probs": [-1, -1]}',
        '{"tokens": [1], "log_probs": ["-1"]}',
        '{"tokens": [1], "log_probs": [1' + "0" * 400 + "]}",
        '{"tokens": [1], "log_probs": [-1], "log_probs": [-2]}',
    ],
)
def test_a_damaged_dump_names_its_line(tmp_path, line):
    (tmp_path / "dump.jsonl").write_text('{"tokens": [1], "log_probs": [-1.5]}\n' + line)
    with pytest.raises(BadConfig, match=r"dump\.jsonl, line 2"):
        load_log_probs(tmp_path / "dump.jsonl")


def test_gates_pass_fail_and_are_chosen_by_name(monkeypatch, tmp_path):
    def fails():
        raise DifferenceFound(field="rows", found=3, allowed=0, reason="They differ.")

    table = (Gate("good", "cpu", "A claim.", lambda: "4 rows"), Gate("bad", "cpu", "A claim.", fails))
    monkeypatch.setattr(gates, "open_suites", lambda folder, mesh: [GateSuite("cpu", table)])
    suites = select_suites("cpu")
    results = list(run_gates(select_gates(suites)))
    assert [(result.name, result.passed) for result in results] == [("good", True), ("bad", False)]
    assert "They differ" in results[1].detail
    assert [gate.name for gate in select_gates(suites, ["bad"])] == ["bad"]
    with pytest.raises(BadConfig, match="good"):
        select_gates(suites, ["god"])
    with pytest.raises(BadConfig, match="sm90"):
        select_suites("sm90")
    with pytest.raises(BadConfig, match="FOLDER"):
        select_suites("cpu", tmp_path)
    with pytest.raises(BadConfig, match=r"--mesh: .*'dp': 2"):
        select_suites("cpu", None, {"dp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in cpu_gates.GATES])
def test_the_gates_pass_here(name):
    (result,) = run_gates(select_gates(select_suites("cpu"), [name]))
    assert result.passed, result.detail


def test_a_gate_fails_where_its_claim_is_false(monkeypatch):
    honest = cpu_gates.pallas_kernels.matmul

    def by_column_count(x, w, **options):
        # The fault that column shards must catch: a schedule that depends on how many columns there are.
        return honest(x, w, **options) * jnp.asarray(1 + 2**-7 * (len(w) < 192), x.dtype)

    monkeypatch.setattr(cpu_gates.pallas_kernels, "matmul", by_column_count)
    (result,) = run_gates(select_gates(select_suites("cpu"), ["column_shards"]))
    assert not result.passed
    assert "over 2 ranks" in result.detail


def test_other_splits_over_pages_fail_the_bindings_gate(monkeypatch):
    """The longest history has more than one: with longer splits it would not."""
    longer = partial(cpu_gates.pallas_kernels.paged_attention, split=2 * DEFAULT_SPLIT)
    monkeypatch.setattr(cpu_gates.pallas_kernels, "paged_attention", longer)
    (result,) = run_gates(select_gates(select_suites("cpu"), ["attention_bindings"]))
    assert not result.passed
    assert "pages of 16" in result.detail


def test_every_gate_says_what_it_proves():
    found = [gate for suite in gates.open_suites() for gate in suite.gates]
    assert all(gate.claim.endswith(".") for gate in found)
    names = [(gate.arch, gate.name) for gate in found]
    assert len(set(names)) == len(names)


def test_a_report_of_a_run_without_steps_can_be_written():
    assert "Nothing was compared yet" in render("empty", [])
