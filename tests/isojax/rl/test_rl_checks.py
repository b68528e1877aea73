"""What comes back from an engine is compared bit by bit, and nothing wrong is learned from."""

import dataclasses

import jax
import numpy as np
import pytest
from rl_samples import VOCABULARY, completion, small_engine, small_params, small_policy

from contracts.errors import BadConfig, DifferenceFound, NonFiniteLogits, UnsupportedRequest, WeightDigestMismatch
from isojax.rl.check_rollout import check_rollout, require_answers
from isojax.rl.mismatch import Mismatch, compare_row, compare_tokens, different_bits
from isojax.rl.packing import cut, padded_length
from isojax.rl.rollout import Sampling, derive_seed, open_engine, request_seed

PROMPTS = [[0, 1], [0, 2, 3]]


@pytest.fixture(scope="module")
def rollout():
    engine = small_engine()
    engine.sync(small_params())
    return engine.generate(PROMPTS, Sampling(max_tokens=3, samples=4, seed=5), full_rows=6)


def checked(completions, params=None):
    return check_rollout(small_policy(), params or small_params(), completions, 1.0, 64)


def test_an_honest_rollout_agrees_in_every_bit(rollout):
    found = checked(rollout)
    assert found.exact
    assert (found.tokens, found.mismatch_tokens, found.full_rows, found.full_row_mismatches) == (24, 0, 6, 0)
    found.require_exact(1)


def test_one_flipped_bit_of_one_token_is_found_and_named(rollout):
    log_probs = rollout[3].log_probs.copy()
    log_probs.view(np.int32)[1] ^= 1
    wrong = [*rollout[:3], dataclasses.replace(rollout[3], log_probs=log_probs), *rollout[4:]]
    found = checked(wrong)
    assert (found.mismatch_tokens, found.full_row_mismatches) == (1, 0)
    assert 0 < found.max_abs < 1e-5
    with pytest.raises(DifferenceFound, match=r"1 of 24 sampled tokens .* completion 3 .*token 1") as error:
        found.require_exact(7)
    assert error.value.exit_code == 1
    assert "step 7" in error.value.field


def test_one_flipped_bit_of_an_unsampled_entry_of_a_row_is_found(rollout):
    index = next(number for number, item in enumerate(rollout) if item.rows)
    place, row = next(iter(rollout[index].rows.items()))
    entry = (rollout[index].tokens[place] + 1) % VOCABULARY
    row = row.copy()
    row.view(np.int32)[entry] ^= 1
    rows = {**rollout[index].rows, place: row}
    wrong = [*rollout[:index], dataclasses.replace(rollout[index], rows=rows), *rollout[index + 1 :]]
    found = checked(wrong)
    assert (found.mismatch_tokens, found.full_rows, found.full_row_mismatches) == (0, 6, 1)
    assert f"vocabulary entry {entry}" in found.first


def test_other_weights_on_the_trainers_side_are_found(rollout):
    params = small_params()
    embed = np.asarray(params["embed"]).copy()
    # One ulp of one weight that every history passes through.
    embed.view(np.uint16)[0, 0] ^= 1
    assert not checked(rollout, {**params, "embed": jax.device_put(embed, jax.devices()[0])}).exact


def test_signed_zeros_differ_and_equal_nans_do_not():
    left = np.array([0.0, np.nan, 1.0], np.float32)
    assert different_bits(left, np.array([-0.0, np.nan, 1.0], np.float32)).tolist() == [True, False, False]
    with pytest.raises(ValueError, match="float64"):
        different_bits(left, left.astype(np.float64))


def test_a_token_that_two_cases_look_at_counts_once_and_rows_add_up():
    one = completion((0,), (1, 2), [-1.0, -2.0])
    score = compare_tokens([one, one], "trainer_score", [np.array([-1.0, -3.0], np.float32), one.log_probs])
    forward = compare_tokens([one, one], "trainer_fwd", [np.array([-1.0, -4.0], np.float32), None])
    row = compare_row(0, 1, np.zeros(3, np.float32), np.zeros(3, np.float32))
    both = score.joined(forward).joined(row).joined(row)
    assert (both.tokens, both.mismatch_tokens, both.max_abs, both.full_rows) == (4, 1, 2.0, 2)
    assert "trainer_score" in both.first


def test_nan_in_a_reported_log_probability_names_request_position_and_region(rollout):
    """trl#6693: one Inf logit made a row NaN, then None, then masked."""
    log_probs = rollout[5].log_probs.copy()
    log_probs[1] = np.nan
    wrong = [*rollout[:5], dataclasses.replace(rollout[5], log_probs=log_probs), *rollout[6:]]
    with pytest.raises(NonFiniteLogits, match=r"request 5 \(prompt 1\), position 4, region log_prob_rows"):
        checked(wrong)


def test_an_infinite_weight_is_traced_to_the_first_region_that_overflows(rollout):
    params = small_params()
    params["layers.gate_up"] = params["layers.gate_up"].at[0, 0, 0].set(np.inf)
    with pytest.raises(NonFiniteLogits, match=r"request 0 \(prompt 0\), position 2, region gated_matmul of layer 0"):
        checked(rollout, params)


def test_a_row_with_infinity_outside_of_the_sampled_token_is_refused(rollout):
    index = next(number for number, item in enumerate(rollout) if item.rows)
    place, row = next(iter(rollout[index].rows.items()))
    row = row.copy()
    row[(rollout[index].tokens[place] + 1) % VOCABULARY] = -np.inf
    wrong = list(rollout)
    wrong[index] = dataclasses.replace(rollout[index], rows={**rollout[index].rows, place: row})
    with pytest.raises(NonFiniteLogits, match=f"request {index} "):
        checked(wrong)


def test_what_comes_back_must_be_what_was_asked(rollout):
    digest = rollout[0].weight_digest
    require_answers(rollout, PROMPTS, 4, digest)
    with pytest.raises(DifferenceFound, match="token in, token out"):
        # Tokens 2 and 3 came back as one, as after detokenising and tokenising again.
        require_answers([*rollout[:4], *(dataclasses.replace(c, prompt_tokens=(0, 5)) for c in rollout[4:])],
                        PROMPTS, 4, digest)  # fmt: skip
    with pytest.raises(DifferenceFound, match="7 completions"):
        require_answers(rollout[:-1], PROMPTS, 4, digest)
    with pytest.raises(WeightDigestMismatch):
        require_answers(rollout, PROMPTS, 4, "f" * 16)
    with pytest.raises(DifferenceFound, match="left some out"):
        require_answers([dataclasses.replace(rollout[0], log_probs=np.zeros(1, np.float32)), *rollout[1:]],
                        PROMPTS, 4, digest)  # fmt: skip


def test_samples_without_a_seed_are_distinct_and_one_seed_gives_one_result():
    """UniRL#208: one default seed gave n equal samples."""
    engine = small_engine()
    engine.sync(small_params())

    def tokens(seed):
        return [item.tokens for item in engine.generate([[0, 1]], Sampling(max_tokens=3, samples=8, seed=seed))]

    assert len(set(tokens(None))) > 1
    assert len(set(tokens(1))) > 1
    assert tokens(None) != tokens(None)
    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_request_seeds_are_distinct_for_steps_prompts_and_samples_and_equal_in_every_process():
    seeds = {request_seed(derive_seed("rollout", 0, step), prompt, sample)
             for step in range(5) for prompt in range(5) for sample in range(5)}  # fmt: skip
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("rollout", 0, 1) == 6496295380156626401


@pytest.mark.parametrize(
    "fields",
    [
        *({"max_tokens": 0}, {"samples": 0}, {"temperature": 0.0}, {"temperature": np.inf}, {"temperature": 1e-50}),
        *({"greedy": True, "samples": 2}, {"max_tokens": 2.5}, {"max_tokens": "3"}, {"samples": True}),
        *({"seed": 1.5}, {"seed": -1}, {"stop_token_ids": (1.0,)}, {"stop_token_ids": "12"}),
    ],
)
def test_samplings_that_no_engine_can_draw_are_refused(fields):
    with pytest.raises(UnsupportedRequest):
        Sampling(**{"max_tokens": 4, **fields})


def test_there_is_no_way_to_ask_for_a_filter():
    for name in ("top_k", "top_p", "min_p", "logit_bias", "repetition_penalty"):
        with pytest.raises(TypeError):
            Sampling(max_tokens=1, **{name: 0.5})


def test_an_engine_that_is_not_installed_is_refused_with_those_that_are():
    with pytest.raises(BadConfig, match="vllm"):
        open_engine("vlm", "folder")


def test_packing_keeps_every_completion_whole_and_values_come_back_where_they_belong():
    completions = [completion((0,) * (index + 1), (1,) * (index + 2)) for index in range(6)]
    micro_batches = cut(completions, [5, 0, 3, 1], 16)
    assert sorted(index for micro in micro_batches for index in micro.completions) == [0, 1, 3, 5]
    assert all(len(micro.batch.tokens) <= 16 for micro in micro_batches)
    values = [np.arange(len(item.tokens), dtype=np.float32) + 10 * index for index, item in enumerate(completions)]
    back = [None] * 6
    for micro in micro_batches:
        packed_T = micro.spread(values)
        assert np.count_nonzero(packed_T) == sum(np.count_nonzero(values[index]) for index in micro.completions)
        assert micro.batch.mask.sum() == sum(len(values[index]) for index in micro.completions)
        micro.gather(packed_T, back)
    for index in (0, 1, 3, 5):
        assert back[index].tolist() == values[index].tolist()
    assert back[2] is None


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_the_size_it_needs():
    with pytest.raises(BadConfig, match="at least 10"):
        cut([completion((0,) * 4, (1,) * 6)], [0], 8)


def test_few_packed_lengths_are_compiled():
    assert [padded_length(tokens, 512) for tokens in (1, 64, 65, 200, 300, 512)] == [64, 64, 128, 256, 512, 512]
    assert len({padded_length(tokens, 512) for tokens in range(1, 513)}) == 4


def test_an_empty_comparison_is_exact():
    assert Mismatch().exact
