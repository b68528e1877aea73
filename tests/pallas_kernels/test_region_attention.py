"""Packed and paged attention are one schedule: equal bits for any page, chunk, neighbour, length and head layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import region_reference as reference
from attention_samples import Packed, packed_attention, paged_attention, sequence

from pallas_kernels.attention import cpu, schedule

pytestmark = pytest.mark.long_file(30)


def unequal(left, right):
    return reference.unequal(left, right)


def decode(own, position, **settings):
    return paged_attention([(own, position, position + 1)], **settings)[0]


def expected_row(own, position, split=512):
    """The NumPy schedule for one query, [H, D]."""
    group = own.q.shape[1] // own.k.shape[1]
    rows = [
        reference.attention_row(
            own.q[position, head * group : (head + 1) * group],
            own.k[: position + 1, head],
            own.v[: position + 1, head],
            scale=own.q.shape[-1] ** -0.5,
            split=split,
            dtype=np.asarray(own.q).dtype,
        )
        for head in range(own.k.shape[1])
    ]
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_attention_equals_its_declared_schedule(dtype):
    own = sequence(0, 300, dtype=dtype)
    (result,) = packed_attention([own], split=128)
    for position in (0, 1, 127, 128, 299):
        assert unequal(result[position], expected_row(own, position, split=128)) == 0


def test_another_split_or_a_lazy_rescale_would_be_seen():
    own = sequence(0, 300)
    (result,) = packed_attention([own], split=128)
    (other,) = packed_attention([own], split=256)
    assert unequal(result, other) > 100
    # Up to the first split nothing has been merged yet.
    assert unequal(result[:128], other[:128]) == 0


@pytest.mark.parametrize("page", [16, 128, 7])
def test_pages_and_chunks_do_not_matter(page):
    own, neighbour = sequence(1, 280), sequence(2, 40)
    whole, other = packed_attention([own, neighbour])
    # A prefill, a decode of another request beside it, then the next chunk.
    first, decoded = paged_attention([(own, 0, 129), (neighbour, 39, 40)], page=page)
    second, prefilled = paged_attention([(own, 129, 280), (neighbour, 0, 9)], page=page)
    assert unequal(np.concatenate([first, second]), whole) == 0
    assert unequal(decoded[0], other[39]) == 0
    assert unequal(prefilled, other[:9]) == 0
    assert unequal(decode(own, 279, page=page)[0], whole[279]) == 0


def test_a_bfloat16_cache_equals_its_int16_view():
    own = sequence(1, 280)
    assert unequal(decode(own, 279), decode(own, 279, as_int16=False)) == 0


def test_decode_equals_prefill_at_every_length_around_a_boundary():
    own = sequence(3, 513)
    whole = [paged_attention([(own, a, b)])[0] for a, b in ((0, 200), (200, 513))]
    whole = np.concatenate(whole)
    lengths = (1, 15, 16, 17, 127, 128, 129, 512, 513)
    for length in lengths:
        assert unequal(decode(own, length - 1)[0], whole[length - 1]) == 0
    together = paged_attention([(own, length - 1, length) for length in lengths[:4]])
    for length, result in zip(lengths, together, strict=False):
        assert unequal(result[0], whole[length - 1]) == 0


@pytest.mark.parametrize(("heads", "key_heads", "head"), [(3, 3, 64), (14, 2, 80), (8, 1, 128), (9, 3, 256)])
def test_head_layouts(heads, key_heads, head):
    own = sequence(4, 140, heads, key_heads, head)
    (whole,) = packed_attention([own])
    chunk, decoded = paged_attention([(own, 60, 140), (own, 130, 131)], page=128)
    assert unequal(chunk, whole[60:]) == 0
    assert unequal(decoded[0], whole[130]) == 0
    for position in (0, 130):
        assert unequal(whole[position], expected_row(own, position)) == 0


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("length", [129, 19_802])
def test_a_neighbour_growing_from_9_to_10_tokens_moves_nothing(page, length):
    # vllm#51902: 14 query heads over 2, head 64; random values, since constant ones hide it.
    own, neighbour = sequence(5, length, 14, 2), sequence(6, 10, 14, 2)
    alone = decode(own, length - 1, page=page)
    for tokens in (9, 10):
        beside = paged_attention([(own, length - 1, length), (neighbour, 0, tokens)], page=page)[0]
        assert unequal(beside, alone) == 0
    assert unequal(alone[0], expected_row(own, length - 1)) == 0


def test_a_lone_decode_stays_causal():
    # vllm-flash-attn#169: the mask was dropped when every query had length 1.
    own, neighbour = sequence(7, 64), sequence(8, 129)
    (whole,) = packed_attention([own])
    for position in (0, 20, 63):
        assert unequal(decode(own, position)[0], whole[position]) == 0
        beside = paged_attention([(own, position, position + 1), (neighbour, 0, 129)])[0]
        assert unequal(beside[0], whole[position]) == 0


def test_a_long_request_does_not_feel_thirty_short_ones():
    # flashinfer#2424: the query tile was chosen by the batch.
    own = sequence(9, 600)
    alone = paged_attention([(own, 500, 600)])[0]
    short = [(sequence(10 + i, 4), 3, 4) for i in range(30)]
    assert unequal(paged_attention([(own, 500, 600), *short])[0], alone) == 0
    assert unequal(paged_attention([*short, (own, 599, 600)])[-1][0], alone[-1]) == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_packed_samples_do_not_leak(dtype):
    # torchtitan#3892.
    sequences = [sequence(20 + n, n, dtype=dtype) for n in (5, 3, 7)]
    for together, own in zip(packed_attention(sequences), sequences, strict=True):
        assert unequal(together, packed_attention([own])[0]) == 0


def test_request_order_does_not_matter_in_poisoned_memory():
    # vllm#42019: three prompts in every order; whatever was never written is NaN.
    own = [sequence(30 + i, 32) for i in range(3)]
    expected = [packed_attention([one])[0] for one in own]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)):
        results = paged_attention([(own[i], 0, 32) for i in order], seed=sum(order))
        for i, result in zip(order, results, strict=True):
            assert unequal(result, expected[i]) == 0


def test_a_stale_page_that_is_not_zeroed_is_caught(monkeypatch):
    own = sequence(40, 20)
    clean = decode(own, 19)
    assert np.isfinite(np.asarray(clean, np.float32)).all()
    monkeypatch.setattr(schedule, "visible_values", lambda words, *_: jnp.moveaxis(cpu.widen(words), 1, 0))
    operands = own.q[19:], own.k, own.v
    poisoned = [jnp.full((2, 16, 2, 64), jnp.nan, jnp.bfloat16).at[0].set(x[:16]) for x in operands[1:]]
    (result,) = jax.jit(lambda *a: cpu.paged_attention(*a, scale=0.125, split=512))(
        operands[0], *poisoned, jnp.array([[0, 1]]), jnp.zeros(1, jnp.int32), jnp.full(1, 15, jnp.int32)
    )
    assert np.isnan(np.asarray(result, np.float32)).all()


def test_a_later_token_that_is_nan_leaves_earlier_ones_alone():
    own = sequence(41, 40)
    broken = own._replace(v=own.v.copy(), k=own.k.copy())
    broken.v[21], broken.k[30] = np.nan, np.nan
    (clean,), (result,) = packed_attention([own]), packed_attention([broken])
    assert unequal(result[:21], clean[:21]) == 0
    assert np.isnan(np.asarray(result[21:], np.float32)).all()
    assert unequal(paged_attention([(broken, 0, 40)])[0][:21], clean[:21]) == 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_masked_block_keeps_every_bit_even_of_negative_zero(zero):
    # Position 0 of a tile that reaches into a second block: its second block is masked as a whole.
    own = sequence(42, 160)
    own = own._replace(v=np.full_like(own.v, zero))
    (whole,) = packed_attention([own])
    (short,) = packed_attention([Packed(own.q[:1], own.k[:1], own.v[:1])])
    assert unequal(short[0], whole[0]) == 0
    tile = paged_attention([(own, 128, 160)])[0]
    assert unequal(tile, whole[128:]) == 0


def test_the_query_tile_is_neutral(monkeypatch):
    own = sequence(43, 320)
    (expected,) = packed_attention([own])
    monkeypatch.setattr(cpu, "QUERY_TILE", 5)
    positions = jnp.arange(320, dtype=jnp.int32)
    form = jax.jit(lambda q, k, v: cpu.attention(q, k, v, positions, positions, 0, scale=0.125, split=512)[0])
    assert unequal(form(*own), expected) == 0


def test_a_context_of_32768_keys():
    own = sequence(44, 32_768, heads=2, key_heads=1)
    last = paged_attention([(own, 32_748, 32_768)], page=128)[0]
    assert unequal(decode(own, 32_767, page=16)[0], last[-1]) == 0
    assert unequal(last[-1], expected_row(own, 32_767)) == 0


def test_no_rows_and_one_row():
    own = sequence(45, 1)
    assert packed_attention([own])[0].shape == own.q.shape
    assert unequal(packed_attention([own])[0], np.repeat(own.v, 2, axis=1)) == 0
    assert unequal(decode(own, 0), np.repeat(own.v, 2, axis=1)) == 0
    empty = jnp.zeros((0, 4, 64), jnp.bfloat16)
    integers = jnp.zeros(0, jnp.int32)
    (result,) = cpu.attention(empty, empty[:, :2], empty[:, :2], integers, integers, 0, scale=1.0, split=512)
    assert result.shape == (0, 4, 64)


def test_layers_splits_and_segments_name_things_and_move_no_bit():
    own = sequence(46, 30)
    assert unequal(packed_attention([own], layer=0)[0], packed_attention([own], layer=7)[0]) == 0
