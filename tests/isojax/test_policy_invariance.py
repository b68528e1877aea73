"""A row's bits don't depend on its neighbours, on padding, on gradients, on remat or on the form that reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_samples import rows_and_gradients
from policy_samples import bits, random_sequences, rows_of, tiny_policy

from contracts.errors import BadConfig, EmptyBatch, PromptTooLong
from isojax import Policy, pack
from isojax.policy import PackedBatch

pytestmark = pytest.mark.long_file(50)

POLICIES = [("qwen3", "bfloat16"), ("llama_tied", "float32")]


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
def test_a_packed_sequence_equals_the_sequence_alone(name: str, dtype: str) -> None:
    policy, params = tiny_policy(name, dtype)
    sequences = random_sequences(5, 3, 7)
    packed = pack(sequences)
    together = policy.log_probs(params, packed)
    reversed_batch = pack(sequences[::-1])
    backwards = policy.log_probs(params, reversed_batch)
    for index, sequence in enumerate(sequences):
        alone_batch = pack([sequence])
        alone = bits(rows_of(alone_batch, policy.log_probs(params, alone_batch), 0))
        np.testing.assert_array_equal(bits(rows_of(packed, together, index)), alone)
        np.testing.assert_array_equal(bits(rows_of(reversed_batch, backwards, len(sequences) - 1 - index)), alone)


def test_a_leak_between_sequences_is_seen() -> None:
    policy, params = tiny_policy()
    sequences = random_sequences(5, 3, 7)
    packed = pack(sequences)
    # One long sequence instead of three: what a forgotten segment boundary computes.
    leaking = packed._replace(
        positions=np.arange(len(packed.tokens), dtype=np.int32), segment_ids=np.zeros(len(packed.tokens), np.int32)
    )
    right, wrong = policy.log_probs(params, packed), policy.log_probs(params, leaking)
    np.testing.assert_array_equal(bits(right)[:4], bits(wrong)[:4])
    assert (bits(rows_of(packed, right, 1)) != bits(rows_of(packed, wrong, 1))).all()


def test_more_padding_moves_no_bit() -> None:
    policy, params = tiny_policy()
    sequences = random_sequences(30, 11)
    short, long = pack(sequences, length_multiple=64), pack(sequences, length_multiple=320)
    for index in range(2):
        np.testing.assert_array_equal(
            bits(rows_of(short, policy.log_probs(params, short), index)),
            bits(rows_of(long, policy.log_probs(params, long), index)),
        )


def test_gradients_and_remat_move_no_bit_of_the_forward() -> None:
    batch = pack(random_sequences(19, 6))
    policy, params = tiny_policy()
    found = [bits(policy.log_probs(params, batch))]
    for remat in ("none", "layer"):
        policy = Policy(policy.config, dtype=policy.dtype, remat=remat)
        rows, (gradients, _) = rows_and_gradients(policy, params, batch)
        found.append(bits(rows))
        assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in gradients.values())
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(("name", "dtype"), POLICIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_and_full_row_forms_agree(name: str, dtype: str, temperature: float) -> None:
    policy, params = tiny_policy(name, dtype)
    batch = pack(random_sequences(17, 4))
    rows = np.flatnonzero(batch.segment_ids >= 0)[::-1]
    full = np.asarray(policy.log_prob_rows(params, batch, rows, temperature))
    sampled = np.asarray(policy.log_probs(params, batch, temperature))
    np.testing.assert_array_equal(bits(full[np.arange(len(rows)), batch.targets[rows]]), bits(sampled[rows]))
    np.testing.assert_allclose(np.exp(full.astype(np.float64)).sum(-1), 1, atol=1e-5)


def test_temperature_divides_the_logits_and_not_the_log_probabilities() -> None:
    policy, params = tiny_policy("llama_tied", "float32")
    batch = pack(random_sequences(21))
    cold = np.asarray(policy.log_prob_rows(params, batch, np.arange(21), 0.6), np.float64)
    unit = np.asarray(policy.log_prob_rows(params, batch, np.arange(21), 1.0), np.float64)
    right = unit / 0.6 - np.log(np.exp(unit / 0.6).sum(-1, keepdims=True))
    np.testing.assert_allclose(cold, right, atol=1e-4)
    assert np.abs(cold - unit / 0.6).max() > 1e-2


def test_a_frequent_token_keeps_its_whole_gradient_in_bf16() -> None:
    # 500 rows of one token: in bf16 a sum of ones stops growing at 256.
    from isojax.policy.embedding import embed

    tokens = jnp.zeros(500, jnp.int32)
    table = jnp.zeros((4, 8), jnp.bfloat16)
    gradient = jax.grad(lambda table: jnp.sum(embed(table, tokens).astype(jnp.float32)))(table)
    np.testing.assert_array_equal(np.asarray(gradient[0], np.float32), 500)


def test_wrong_arguments_are_refused_by_name() -> None:
    policy, params = tiny_policy()
    batch = pack(random_sequences(3))
    empty = PackedBatch(*(field[:0] for field in batch))
    with pytest.raises(EmptyBatch, match=r"batch\.tokens"):
        policy.log_probs(params, empty)
    with pytest.raises(EmptyBatch, match="rows"):
        policy.log_prob_rows(params, batch, np.array([], np.int32))
    for rows in ([64], [-1]):
        with pytest.raises(BadConfig, match=r"rows: found .*; allowed: 0\.\.63"):
            policy.log_prob_rows(params, batch, np.array(rows))
    # XLA would clamp these to the last row of the table and of the embedding.
    with pytest.raises(PromptTooLong, match=r"batch\.positions: found 514"):
        policy.log_probs(params, batch._replace(positions=batch.positions + 512))
    with pytest.raises(BadConfig, match=r"batch\.tokens: found .*97"):
        policy.log_probs(params, batch._replace(tokens=np.full_like(batch.tokens, 97)))
    with pytest.raises(BadConfig, match="params"):
        policy.log_probs({name: params[name] for name in params if name != "embed"}, batch)
    with pytest.raises(BadConfig, match="dtype"):
        tiny_policy("qwen3", "float16")
    with pytest.raises(BadConfig, match="remat"):
        Policy(policy.config, remat="dots")  # type: ignore[arg-type]


def test_parameters_of_another_dtype_and_temperatures_without_rows_are_refused() -> None:
    policy, params = tiny_policy()
    batch = pack([[1, 2]])
    with pytest.raises(BadConfig, match=r"params\[embed\]: found float32.*allowed: bfloat16"):
        policy.log_probs(params | {"embed": params["embed"].astype(jnp.float32)}, batch)
    with pytest.raises(BadConfig, match=r"params\[embed\]"):
        jax.eval_shape(policy.score, params | {"embed": params["embed"][:5]}, policy.buffers, batch)
    for temperature in (0.0, float("nan"), -1.0, 1e-50):
        with pytest.raises(BadConfig, match="temperature"):
            policy.log_probs(params, batch, temperature)
        with pytest.raises(BadConfig, match="temperature"):
            policy.log_prob_rows(params, batch, np.array([0]), temperature)
