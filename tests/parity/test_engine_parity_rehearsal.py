"""The card's parity benchmark, run as a whole on this machine's CPU engine with a tiny policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from engine_samples import tiny_policy

from isojax import export_policy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import engine_parity_bench
from engine_parity import Options, run
from engine_parity_cases import Sizes

pytestmark = [pytest.mark.engine, pytest.mark.long_file(65)]

SIZES = Sizes(
    batches=(3,),
    decode_tokens=4,
    rows=6,
    round_prompts=5,
    round_tokens=4,
    round_longest=40,
    round_rows=8,
    preempted_tokens=8,
    long_prompts=2,
    long_tokens=2,
    sync_prompts=4,
    sync_tokens=4,
)
OPTIONS = Options(tokens=50, graphs=(False,), step_tokens=(32, 32), sizes=SIZES)
BATCH_CASES, LONG, ROUNDS = 4, 1, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    policy, _ = tiny_policy("bfloat16", tied=False)
    place = tmp_path_factory.mktemp("policy") / "weightless"
    export_policy(place, policy, None, {})
    return place


def test_the_whole_benchmark_is_exact_on_a_policy_without_weights(folder, tmp_path):
    out = tmp_path / "results.json"
    totals = run(folder, OPTIONS, out)
    written = json.loads(out.read_text())
    assert totals == written["totals"]
    assert totals["exact"], written["cases"]
    assert totals["tokens"] >= OPTIONS.tokens
    assert totals["rows"] >= 30
    assert 1.0 < totals["mean_token_entropy"] < 2.5
    assert len(written["cases"]) == BATCH_CASES * len(SIZES.batches) + LONG + ROUNDS + 1
    (sync,) = (case for name, case in written["cases"].items() if name.startswith("sync"))
    assert sync["mismatches_against_the_old_weights"] > 0
    assert sync["back_equals_first"]
    chunked = [case for name, case in written["cases"].items() if name.startswith("chunked")]
    assert all(case["chunk_ends"] > 0 for case in chunked)


def test_a_trainer_with_other_weights_is_found_in_every_case(folder, tmp_path, monkeypatch):
    compare = engine_parity_bench.Bench.compare

    def with_another_norm(self, completions, tapped, params):
        norms = params["norms"]
        return compare(self, completions, tapped, {**params, "norms": norms.at[0, 0].set(2 * norms[0, 0])})

    monkeypatch.setattr(engine_parity_bench.Bench, "compare", with_another_norm)
    few = dataclasses.replace(OPTIONS, tokens=0)
    totals = run(folder, few, tmp_path / "results.json")
    assert len(totals["inexact_cases"]) == BATCH_CASES + LONG + 1, "every path and the sync"
    assert totals["token_mismatches"] > 0
    assert totals["row_mismatches"] > totals["rows"] // 2


def test_an_engine_that_does_not_start_is_written_down(folder, tmp_path, monkeypatch):
    def refuse(self, **settings):
        raise RuntimeError("no memory for the cache")

    monkeypatch.setattr(engine_parity_bench.Bench, "engine", refuse)
    out = tmp_path / "results.json"
    totals = run(folder, OPTIONS, out)
    assert (totals["exact"], totals["failed_cases"]) == (False, ["engine, graphs off, seed 0"])
    (case,) = json.loads(out.read_text())["cases"].values()
    assert case["error"] == "RuntimeError: no memory for the cache"
