"""The parity benchmark: its cases, its files, when it calls itself exact, and how random weights get their entropy."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from policy_samples import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import engine_parity
from engine_parity_cases import PAGE, Case, Prompts, Sizes, plan
from engine_parity_policies import other_parameters, random_parameters, scaled_to_entropy
from engine_parity_results import Results, summary
from engine_parity_stock import plain_scores

from contracts.errors import BadConfig
from isojax import Policy, PolicyConfig, pack
from isojax.evidence.engine_parity import entropy
from isojax.kernels import KernelShapes
from pallas_kernels.attention.spec import DEFAULT_SPLIT
from pallas_kernels.kernel_shapes import PAGE_SIZES

pytestmark = pytest.mark.long_file(35)

IDENTITY = {"weights": "a", "numerical_policy": "b"}
EXACT = {"tokens": 10, "rows": 2, "token_mismatches": 0, "row_mismatches": 0, "entropy_sum": 3.0, "exact": True}


def test_the_plan_reaches_its_tokens_on_every_path_and_batch():
    sizes = Sizes()
    cases = plan(sizes, context=8192, step_tokens=1024, tokens=300_000, seed=7, on_card=True)
    assert 300_000 <= sum(case.tokens for case in cases) < 300_000 + sizes.round_prompts * sizes.round_tokens
    assert len({(case.name, case.seed) for case in cases}) == len(cases)
    for path in ("prefill", "chunked prefill", "cache hit", "decode"):
        assert {case.prompts for case in cases if case.name.startswith(path)} == {1, 8, 64, 256}
    assert all(case.last > 1024 for case in cases if case.proof == "chunk")
    # A hit is of whole pages, and the last token is always computed.
    assert all(case.shortest > PAGE for case in cases if case.proof == "hit")
    assert sum(case.prompts for case in cases if case.name.startswith("round")) > sizes.batches[-1]


def test_with_steps_as_long_as_the_context_the_long_prompt_is_cut_in_company():
    cases = plan(Sizes(), context=8192, step_tokens=8192, tokens=0, seed=0, on_card=True)
    cut = [case for case in cases if case.proof == "chunk"]
    assert {case.prompts for case in cut} == {8, 64, 256}
    for case in cut:
        lengths = [len(prompt) for prompt in Prompts(np.arange(10_000)).draw(case)[0]]
        # vLLM takes prompts in their order: what is left of a step when the last one comes does not hold it.
        assert lengths[-1] == 8184
        assert 8192 - sum(lengths[:-1]) % 8192 < 8184


def test_many_histories_have_several_splits():
    sizes = Sizes()
    (case,) = (
        case
        for case in plan(sizes, context=8192, step_tokens=8192, tokens=0, seed=0, on_card=True)
        if case.name.startswith("long prompts")
    )
    lengths = [len(prompt) for prompt in Prompts(np.arange(10_000)).draw(case)[0]]
    assert sum(length > DEFAULT_SPLIT for length in lengths) * case.new_tokens > 500
    # All at once in the cache.
    assert sum(lengths) + case.tokens < sizes.cache_tokens


@pytest.mark.parametrize("page", PAGE_SIZES[:-1])
def test_a_hit_is_of_a_whole_page_and_all_its_prompts_stay_in_the_cache(page):
    sizes = Sizes()
    cases = plan(sizes, context=8192, step_tokens=512, tokens=0, seed=0, on_card=True, page=page)
    hits = [case for case in cases if case.proof == "hit"]
    assert len(hits) == len(sizes.batches)
    for case in hits:
        pages_each = -(-(case.longest + case.new_tokens) // page)
        assert case.shortest > page
        assert case.prompts * pages_each < sizes.cache_tokens // page


def test_a_bundle_is_prepared_with_other_pages(monkeypatch, tmp_path):
    """Up to the sealing, which takes minutes."""
    found = []

    def seal_policy(policy, shapes, **options):
        found.append(shapes)
        raise InterruptedError

    monkeypatch.setattr("isojax.kernels.sealing.seal_policy", seal_policy)
    for options in ([], ["--page-size", "64"], ["--page-size", "128"]):
        arguments = ["engine_parity.py", str(tmp_path / "policy"), "--prepare", "qwen3_8b", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(InterruptedError):
            engine_parity.main()
    assert [shapes.page_size for shapes in found] == [KernelShapes().page_size, 64, 128]
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "48"])
    with pytest.raises(BadConfig, match="page_size"):
        engine_parity.main()


def test_the_cache_holds_a_round_but_not_the_preemption_case():
    sizes = Sizes()
    (preempted,) = (
        c for c in plan(sizes, context=8192, step_tokens=512, tokens=0, seed=0, on_card=True) if c.proof == "preempt"
    )
    assert preempted.prompts * (preempted.shortest + preempted.new_tokens) > 1.1 * sizes.cache_tokens
    assert sizes.batches[-1] * (sizes.round_longest / 2 + sizes.round_tokens + PAGE) < 0.95 * sizes.cache_tokens


def test_prompts_are_counted_once_and_have_the_lengths_asked_for():
    prompts = Prompts(np.arange(5000))
    case = Case("any", 200, 40, 80, 1, 0, seed=3, last=100)
    drawn, new = prompts.draw(case)
    assert [len(drawn[-1]), min(map(len, drawn)) >= 40, max(map(len, drawn[:-1])) <= 80] == [100, True, True]
    assert new == len({tuple(prompt) for prompt in drawn}) > 190
    assert prompts.draw(case) == (drawn, 0)


def test_results_of_several_calls_add_up_in_one_file(tmp_path):
    path = tmp_path / "policy.json"
    Results(path, IDENTITY).add("one", {**EXACT, "histories": 5})
    again = Results(path, IDENTITY)
    again.add("two", {**EXACT, "tokens": 20, "max_abs": 0.0})
    again.add("one", {**EXACT, "tokens": 11, "histories": 6})
    totals = json.loads(path.read_text())["totals"]
    assert (totals["tokens"], totals["rows"], totals["histories"], totals["exact"]) == (31, 4, 6, True)
    assert totals["mean_token_entropy"] == 1.5
    assert len(json.loads(path.read_text())["calls"]) == 2
    with pytest.raises(ValueError, match="is about"):
        Results(path, {**IDENTITY, "weights": "c"})


@pytest.mark.parametrize("spoilt", [{"exact": False, "token_mismatches": 1}, {"exact": False, "error": "no preempt"}])
def test_one_difference_or_failure_spoils_the_verdict(tmp_path, spoilt):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    Results(good, IDENTITY).add("one", EXACT)
    assert summary([good])["exact"]
    results = Results(bad, IDENTITY)
    results.add("one", EXACT)
    results.add("two", {**EXACT, **spoilt})
    assert not results.content["totals"]["exact"]
    found = summary([good, bad])
    assert (found["exact"], found["totals"]["tokens"]) == (False, 30)


def test_nothing_measured_is_not_exact(tmp_path):
    results = Results(tmp_path / "none.json", IDENTITY)
    results.note("seconds", 1.0)
    assert not results.content["totals"]["exact"]


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_get_the_entropy_asked_for(tied):
    raw = {**FAMILIES["qwen3"], "vocab_size": 2000, "hidden_size": 128, "tie_word_embeddings": tied}
    policy = Policy(PolicyConfig.from_hugging_face(raw))
    params = random_parameters(policy, seed=1)
    policy.check_parameters(params)
    packing = {"length_multiple": 1024}
    scaled = scaled_to_entropy(policy, params, 1.5, packing=packing, rows=512)
    generator = np.random.default_rng(9)
    batch = pack([generator.integers(3, 2000, 100).tolist() for _ in range(8)], **packing)
    rows = np.flatnonzero(np.asarray(batch.positions) >= 32)[:512]

    def mean(weights):
        return float(entropy(policy.log_prob_rows(weights, batch, rows)).mean())

    assert mean(params) > 5
    assert 1.0 < mean(scaled) < 2.0


def test_other_parameters_differ_in_every_matrix():
    policy = Policy(PolicyConfig.from_hugging_face(FAMILIES["qwen3"]))
    params = random_parameters(policy, seed=0)
    other = other_parameters(params)
    policy.check_parameters(other)
    for name in params:
        assert np.array_equal(np.asarray(params[name]), np.asarray(other[name])) == (not name.startswith("layers."))


def test_the_plain_forward_comes_close_to_the_policy_and_no_closer():
    policy = Policy(PolicyConfig.from_hugging_face(FAMILIES["llama_tied"] | {"torch_dtype": "bfloat16"}))
    params = random_parameters(policy, seed=0)
    generator = np.random.default_rng(4)
    prompts = [generator.integers(1, 90, length).tolist() for length in (3, 17, 40)]
    tokens = [generator.integers(1, 90, 9).tolist() for _ in prompts]
    found = np.concatenate(plain_scores(policy, params, prompts, tokens))
    batch = pack([p + t for p, t in zip(prompts, tokens, strict=True)], [len(p) for p in prompts], length_multiple=1024)
    exact = np.asarray(policy.log_probs(params, batch))[np.asarray(batch.mask)]
    assert found.shape == exact.shape == (27,)
    assert 0 < np.abs(found - exact).max() < 0.1
