"""VllmEngine on a tiny bf16 policy with an untied head: weights, seeds, caches, refusals."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import jax
import numpy as np
import pytest
import torch
from engine_samples import VOCABULARY, Running, bits, engine_rows, same_bits, tiny_policy
from vllm import SamplingParams

from contracts import handshake
from contracts.errors import (
    BadCheckpoint,
    BadConfig,
    EmptyBatch,
    HandshakeRefused,
    NonFiniteLogits,
    PromptTooLong,
    UnsupportedRequest,
    WeightDigestMismatch,
)
from isojax import digest
from isojax.rl.rollout import RolloutEngine, Sampling, open_engine

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("original_weights"), pytest.mark.long_file(55)]


def _model(running: Running):
    return running.engine._llm.llm_engine.model_executor.driver_worker.worker.get_model()


def _moved_by_one_ulp(params: dict[str, jax.Array], name: str, rows: slice) -> dict[str, jax.Array]:
    """The largest weight of these output rows of layer 0, moved: its unit in the last place is the widest."""
    array = np.array(params[name])
    part = np.abs(array[0, rows].astype(np.float32))
    row, column = np.unravel_index(int(part.argmax()), part.shape)
    array.view(np.uint16)[0, rows.start + row, column] += 1
    return {**params, name: jax.numpy.asarray(array)}


def _key_rows(running: Running) -> slice:
    config = running.policy.config
    return slice(config.query_size, config.query_size + config.key_size)


def test_it_is_a_rollout_engine_whose_report_passes_the_handshake(running):
    assert isinstance(running.engine, RolloutEngine)
    running.engine.generate(running.prompts([5, 40], seed=1), Sampling(max_tokens=3, seed=1))
    report = running.engine.report()
    handshake(running.engine.contract, report, trainer_mesh={"dp": 1}, weight_digest=digest(running.params))
    assert {case: set(regions) for case, regions in report.served.items()} == {
        case: set(regions) for case, regions in report.installed.items()
    }


def test_a_sync_is_seen_by_every_form_of_the_weights(running):
    """Case 16: a cached cast of the head must not go stale; twice, against the trainer's values of the last weights."""
    prompts = running.prompts([6, 30], seed=2)
    for seed in (1, 2):
        _, params = tiny_policy("bfloat16", tied=False, seed=seed)
        assert running.engine.sync(params) == digest(params)
        completions = running.engine.generate(prompts, Sampling(max_tokens=4, seed=seed), full_rows=8)
        assert same_bits(engine_rows(completions), running.trainer_rows(completions, params))


def test_one_ulp_of_one_weight_is_seen_through_the_prefix_cache(running):
    """Case 21. The key projection of layer 0 moves, so every cached key of the prompt is stale."""
    moved = _moved_by_one_ulp(running.params, "layers.qkv", _key_rows(running))
    prompts, sampling = running.prompts([60], seed=3), Sampling(max_tokens=4, seed=3)
    before = running.engine.generate(prompts, sampling, full_rows=4)
    running.engine.sync(moved)
    after = running.engine.generate(prompts, sampling, full_rows=4)
    assert running.cached_tokens == [0], "the prompt's pages must be computed anew"
    assert not same_bits(engine_rows(before), engine_rows(after)), "one ulp here should move some bit"
    assert same_bits(engine_rows(after), running.trainer_rows(after, moved))


def test_without_emptying_the_prefix_cache_stale_keys_would_be_served(running, monkeypatch):
    """The fault that case 21 is about, planted."""
    moved = _moved_by_one_ulp(running.params, "layers.qkv", _key_rows(running))
    prompts, sampling = running.prompts([60], seed=3), Sampling(max_tokens=4, seed=3)
    running.engine.generate(prompts, sampling)
    monkeypatch.setattr(running.engine, "_empty_prefix_cache", lambda: None)
    running.engine.sync(moved)
    stale = running.engine.generate(prompts, sampling, full_rows=4)
    assert running.cached_tokens[0] > 0
    assert not same_bits(engine_rows(stale), running.trainer_rows(stale, moved))


def test_samples_without_a_seed_differ_and_with_the_same_seed_agree(running):
    """Case 22."""
    prompt = running.prompts([8], seed=4)
    fresh = running.engine.generate(prompt, Sampling(max_tokens=8, samples=8))
    assert len({completion.tokens for completion in fresh}) == 8
    first = running.engine.generate(prompt, Sampling(max_tokens=8, samples=8, seed=11))
    second = running.engine.generate(prompt, Sampling(max_tokens=8, samples=8, seed=11))
    assert [completion.tokens for completion in first] == [completion.tokens for completion in second]
    assert len({completion.tokens for completion in first}) == 8


def test_one_decode_alone_and_beside_a_longer_prefill(running):
    """Case 2: a step whose queries all have length 1, and the same request in a step with a prefill chunk."""
    short, long = running.prompts([5, 129], seed=5)
    sampling = Sampling(max_tokens=6, seed=5)
    (alone,) = running.engine.generate([short], sampling)
    beside, neighbour = running.engine.generate([short, long], sampling)
    assert alone.tokens == beside.tokens
    assert same_bits([alone.log_probs], [beside.log_probs])
    assert same_bits([beside.log_probs, neighbour.log_probs], running.trainer_score([beside, neighbour]))


@pytest.mark.parametrize("rows", [7, 8, 9, 31, 32, 33, 63, 64, 65])
def test_bucket_edges_with_dead_rows(running, rows):
    """Cases 4 and 5: one row less than a bucket (so one dead row), a full bucket, one more; for decode and prefill."""
    completions = running.engine.generate(running.prompts([4] * rows, seed=rows), Sampling(max_tokens=2, seed=6))
    assert same_bits([completion.log_probs for completion in completions], running.trainer_score(completions))
    prompts = running.prompts([rows], seed=rows)
    assert same_bits(running.engine.score(prompts), running.trainer_prompt_scores(prompts))


def test_prompt_scores_do_not_depend_on_order_or_old_memory(running):
    """Case 7: three overlapping 32-token prompts in every order, with every cached page poisoned before each."""
    first, second, third = running.prompts([32, 32, 32], seed=7)
    prompts = [first, first[:16] + second[:16], first[:24] + third[:8]]
    expected = running.trainer_prompt_scores(prompts)
    for order in permutations(range(3)):
        for layer in _model(running).layers:
            layer.kv_cache.fill_(torch.nan)
        with torch.inference_mode():
            for inputs in _model(running)._inputs.values():
                for tensor in inputs:
                    tensor.fill_(VOCABULARY - 1)
        scores = running.engine.score([prompts[index] for index in order])
        by_prompt = [scores[order.index(index)] for index in range(3)]
        assert same_bits(expected, by_prompt)
    for layer in _model(running).layers:
        layer.kv_cache.zero_()


def test_full_rows_come_in_the_number_asked_for(running):
    prompts = running.prompts([4, 9, 17], seed=8)
    for wanted, available in ((1, 1), (7, 7), (1000, 15)):
        completions = running.engine.generate(prompts, Sampling(max_tokens=5, seed=8), full_rows=wanted)
        rows = engine_rows(completions)
        assert rows.shape == (available, running.policy.config.vocab_size)
        for completion in completions:
            for place, row in (completion.rows or {}).items():
                assert bits([row[completion.tokens[place]]]) == bits([completion.log_probs[place]])
    assert running.engine.generate(prompts, Sampling(max_tokens=2))[0].rows is None


def test_a_stop_token_ends_a_completion_and_is_its_last_token(running):
    prompt = running.prompts([10], seed=9)
    (free,) = running.engine.generate(prompt, Sampling(max_tokens=8, seed=9))
    stop = free.tokens[3]
    (stopped,) = running.engine.generate(prompt, Sampling(max_tokens=8, seed=9, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert free.finish_reason == "length"


def test_greedy_takes_the_most_likely_token(running):
    completions = running.engine.generate(
        running.prompts([10], seed=10), Sampling(max_tokens=5, greedy=True), full_rows=5
    )
    (completion,) = completions
    assert completion.tokens == tuple(int(np.argmax(completion.rows[place])) for place in range(5))
    assert same_bits(engine_rows(completions), running.trainer_rows(completions))


def test_a_damaged_sync_is_refused_and_the_engine_stays_shut(running, monkeypatch):
    send = running.engine._sender.send

    def damaged(params):
        # One bit of one weight, between the trainer's digest and the engine.
        send(_moved_by_one_ulp(dict(params), "layers.down", slice(0, 4)))

    monkeypatch.setattr(running.engine._sender, "send", damaged)
    with pytest.raises(WeightDigestMismatch, match="trainer's"):
        running.engine.sync(running.params)
    with pytest.raises(WeightDigestMismatch, match="no successful sync"):
        running.engine.generate(running.prompts([4], seed=1), Sampling(max_tokens=1))
    monkeypatch.undo()
    running.engine.sync(running.params)
    running.engine.generate(running.prompts([4], seed=1), Sampling(max_tokens=1))


def test_an_incomplete_sync_leaves_no_known_weights(running, monkeypatch):
    send = running.engine._sender.send
    monkeypatch.setattr(
        running.engine._sender, "send", lambda params: send({k: v for k, v in params.items() if k != "embed"})
    )
    with pytest.raises(WeightDigestMismatch, match="without complete weights"):
        running.engine.sync(running.params)


def test_a_weight_written_behind_our_back_is_found(running):
    weights = _model(running).weights
    weights.tensor("layers.o", torch.float32)[0, 0, 0] = 1.2345678
    with pytest.raises(BadCheckpoint, match="no bfloat16"):
        running.engine._rpc("isojax_weight_digest", True)


def test_addresses_of_weights_survive_a_sync(running):
    before = [tensor.data_ptr() for tensor in _model(running).weights.state_dict().values()]
    running.engine.sync(running.params)
    assert [tensor.data_ptr() for tensor in _model(running).weights.state_dict().values()] == before


@pytest.mark.parametrize("wrong", ["missing", "unknown", "dtype", "shape"])
def test_parameters_of_another_policy_are_refused(running, wrong):
    params = dict(running.params)
    if wrong == "missing":
        del params["layers.o"]
    elif wrong == "unknown":
        params["layers.extra"] = params["layers.o"]
    elif wrong == "dtype":
        params["layers.o"] = params["layers.o"].astype("float32")
    else:
        params["layers.o"] = params["layers.o"][:, :-1]
    with pytest.raises(BadCheckpoint, match=r"layers\.(o|extra)"):
        running.engine.sync(params)


def test_no_sync_and_no_sleep_while_requests_run(running, monkeypatch):
    monkeypatch.setattr(running.engine, "options", dataclasses.replace(running.engine.options, sleep_mode=True))
    engine = running.engine._llm.llm_engine
    engine.add_request("other", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4))
    try:
        with pytest.raises(UnsupportedRequest, match="1 requests in flight"):
            running.engine.sync(running.params)
        with pytest.raises(UnsupportedRequest, match="1 requests in flight"):
            running.engine.sleep()
    finally:
        engine.abort_request(list(engine.output_processor.request_states), internal=True)


def test_an_infinite_logit_is_named_and_the_engine_goes_on(running):
    """Case 14, in the head: finite hidden states, an overflowing product."""
    head = running.params["lm_head"]
    running.engine.sync({**running.params, "lm_head": head.at[7].set(3e38)})
    with pytest.raises(NonFiniteLogits, match=r"prompt \d, sample 0, position \d+, region log_prob_rows"):
        running.engine.generate(running.prompts([4, 6], seed=11), Sampling(max_tokens=4, seed=1))
    running.engine.sync(running.params)
    completions = running.engine.generate(running.prompts([4, 6], seed=11), Sampling(max_tokens=4, seed=1))
    assert same_bits([c.log_probs for c in completions], running.trainer_score(completions))


def test_a_request_from_elsewhere_meets_the_error_itself(running):
    """Nobody would ask for a recorded fault of a request that did not come from VllmEngine (a server's, say)."""
    running.engine.sync({**running.params, "lm_head": running.params["lm_head"].at[7].set(3e38)})
    with pytest.raises(NonFiniteLogits, match="region log_prob_rows"):
        running.engine._run([[5, 6, 7]], [SamplingParams(max_tokens=2, detokenize=False)])
    running.engine.sync(running.params)
    (completion,) = running.engine.generate([[5, 6, 7]], Sampling(max_tokens=4, seed=1))
    assert same_bits([completion.log_probs], running.trainer_score([completion]))


@pytest.mark.parametrize(
    ("prompts", "sampling", "refusal", "named"),
    [
        ([], Sampling(max_tokens=1), EmptyBatch, "prompts"),
        ([[3], []], Sampling(max_tokens=1), EmptyBatch, "prompts"),
        ([[3] * 256], Sampling(max_tokens=1), PromptTooLong, r"prompts\[0\]: found 256 tokens; allowed: at most 255"),
        (
            [[3, 300]],
            Sampling(max_tokens=1),
            UnsupportedRequest,
            r"prompts\[0\]\[1\]: found token 300; allowed: .* 0 to 299",
        ),
        ([[3]], Sampling(max_tokens=1, temperature=0.6), UnsupportedRequest, r"temperature: found 0\.6; allowed: 1\.0"),
    ],
    ids=["no prompt", "empty prompt", "too long", "unknown token", "other temperature"],
)
def test_what_it_cannot_sample_is_refused(running, prompts, sampling, refusal, named):
    with pytest.raises(refusal, match=named):
        running.engine.generate(prompts, sampling)


def test_the_longest_prompt_leaves_room_for_one_token(running):
    (completion,) = running.engine.generate(running.prompts([255], seed=12), Sampling(max_tokens=9, seed=1))
    assert len(completion.tokens) == 1
    assert same_bits([completion.log_probs], running.trainer_score([completion]))


def test_nothing_is_sampled_before_handshake_and_sync(running, monkeypatch):
    monkeypatch.setattr(running.engine, "_digest", None)
    with pytest.raises(WeightDigestMismatch, match="no successful sync"):
        running.engine.generate([[3]], Sampling(max_tokens=1))
    monkeypatch.setattr(running.engine, "_reported", False)
    with pytest.raises(HandshakeRefused, match="handshake"):
        running.engine.generate([[3]], Sampling(max_tokens=1))


def test_an_interrupted_call_leaves_nothing_in_flight(running, monkeypatch):
    engine = running.engine._llm.llm_engine
    step, calls = engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.engine.generate(running.prompts([5, 6], seed=13), Sampling(max_tokens=20, seed=1))
    monkeypatch.undo()
    running.engine.sync(running.params)
    completions = running.engine.generate(running.prompts([5, 6], seed=13), Sampling(max_tokens=4, seed=1))
    assert same_bits([c.log_probs for c in completions], running.trainer_score(completions))


def test_unknown_settings_are_refused_before_anything_starts(running):
    with pytest.raises(BadConfig, match=r"engine\.settings\.gpus"):
        open_engine("vllm", running.folder, gpus=1)
    with pytest.raises(BadConfig, match="page_size"):
        open_engine("vllm", running.folder, page_size="16")
