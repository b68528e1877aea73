"""The attention kernels' sources, run in Pallas's GPU interpreter on small shapes: right, and free of data races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_samples import close, normal, run

pytestmark = [pytest.mark.sealing, pytest.mark.slow]


def _attention(q, k, v):
    """Causal attention of one key head in float32: q [N, H, D], k and v [L, D], queries last."""
    scores = jnp.einsum("nhd,ld->hnl", q.astype(jnp.float32), k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    visible = jnp.arange(len(k)) <= jnp.arange(len(k) - len(q), len(k))[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("hnl,ld->nhd", weights, v.astype(jnp.float32))


@pytest.mark.parametrize("multiprocessors", [1, 132], ids=["a block takes two heads", "a block takes one head"])
def test_attention_of_two_packed_sequences(multiprocessors, monkeypatch):
    from pallas_kernels.attention import hopper_tiles
    from pallas_kernels.attention.hopper import attention_program

    monkeypatch.setattr(hopper_tiles, "sm_count", lambda: multiprocessors)
    lengths, T, D = (40, 29), 72, 64
    positions, segments = np.zeros(T, np.int32), np.full(T, -1, np.int32)
    for number, (first, length) in enumerate(zip((0, 40), lengths, strict=True)):
        positions[first : first + length] = np.arange(length)
        segments[first : first + length] = number
    q, k, v = normal(0, T, 2, D), normal(1, T, 1, D), normal(2, T, 1, D)
    program = attention_program(T, 2, 1, D, scale=0.125, split=256, staged_weights=True)
    (out,) = run(program, q, k, v, jnp.asarray(positions), jnp.asarray(segments), jnp.int32(0))
    for first, length in zip((0, 40), lengths, strict=True):
        rows = slice(first, first + length)
        close(out[rows], _attention(q[rows], k[rows, 0], v[rows, 0]), 2e-2)
    assert bool((out[69:] == 0).all())


@pytest.mark.parametrize(
    ("options", "split"),
    [({"blocks": 3}, 128), ({"blocks": 40}, 256), ({"blocks": 3, "scratch_bytes": 0}, 256)],
    ids=str,
)
def test_attention_over_pages(options, split):
    """Contexts that end inside, at and beyond a block's and a split's edge, between them requests of several tokens."""
    # (first position, tokens) of each request, and two rows of padding after each that has several tokens.
    requests = [(0, 1), (126, 1), (127, 1), (3, 5), (255, 1), (256, 1), (250, 10), (520, 1)]
    _check_attention_over_pages(requests, 0, 32, split, options)


def test_pages_smaller_than_a_block():
    """A last block of which pages are missing, full ones, and several requests after each other in one tile."""
    _check_attention_over_pages([(0, 1), (127, 1), (141, 1), (3, 5), (250, 10)], 0, 32, 128, {"blocks": 2}, page=32)


@pytest.mark.parametrize("at", [506, 511])
def test_single_tokens_of_a_batch_that_is_looked_up_in_turns(at):
    _check_attention_over_pages([(40, 1), (129, 1), (3, 5), (255, 1)], at, 528, 128, {"blocks": 2})


@pytest.mark.parametrize(
    ("head", "options"),
    [
        (64, {"blocks": 3}),
        (64, {"blocks": 40}),
        (64, {"blocks": 3, "scratch_bytes": 0}),
        (128, {"blocks": 3}),
        (256, {"blocks": 3}),
    ],
    ids=str,
)
def test_a_decode_step_without_tiles_gives_the_same_bits(head, options):
    """Padding before, between and behind single tokens; rows of a request with several tokens are another program's."""
    from pallas_kernels.attention.hopper import paged_attention_program

    H, K, page, pages_each, T = 4, 2, 16, 10, 16
    positions = np.array([0, 3, 127, 128, 0, 17, 140, 5, 6, 0, 0, 40, 0, 0, 0, 0], np.int32)
    owner = np.array([-1, 0, 1, 2, -1, 3, 4, 5, 5, -1, -1, 6, -1, -1, -1, -1], np.int32)
    pages = pages_each * 7
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(7, pages_each)
    q, k, v = normal(0, T, H, head), normal(1, pages, page, K, head), normal(2, pages, page, K, head)
    sizes = {"pages": pages, "page": page, "requests": T, "request_pages": pages_each}
    table = jnp.asarray(np.concatenate([table, np.zeros((T - 7, pages_each), np.int32)]))
    found = {}
    for only in (False, True):
        program = paged_attention_program(
            T, H, K, head, **sizes, scale=0.125, split=128, staged_weights=True, single_tokens_only=only, **options
        )
        (out,) = run(program, q, k, v, table, jnp.asarray(owner), jnp.asarray(positions))
        found[only] = np.asarray(out)
    several, single = owner == 5, (owner >= 0) & (owner != 5)
    assert [step.name for step in program.steps] == ["decode"] + ["combine"] * ("scratch_bytes" not in options)
    assert np.isfinite(found[False].astype(np.float32)).all()
    assert (found[True][single].view(np.int16) == found[False][single].view(np.int16)).all()
    assert (found[True][owner < 0].view(np.int16) == 0).all()
    assert np.isnan(found[True][several].astype(np.float32)).all()


def _check_attention_over_pages(requests, at, T, split, options, page=128):
    """``at``: the first row of the batch that is not padding."""
    from pallas_kernels.attention.hopper import paged_attention_program

    H, K, D, pages_each = 2, 2, 64, 640 // page
    owner, positions, rows = np.full(T, -1, np.int32), np.zeros(T, np.int32), []
    for number, (first, count) in enumerate(requests):
        rows.append(slice(at, at + count))
        owner[rows[-1]], positions[rows[-1]] = number, np.arange(first, first + count)
        at += count + 2 * (count > 1)
    pages = pages_each * len(requests)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(len(requests), pages_each)
    q, *caches = normal(0, T, H, D), normal(1, pages, page, K, D), normal(2, pages, page, K, D)
    # What nothing wrote must not matter. Copies are checked for where they come from, too.
    written = np.zeros((pages, page, 1, 1), bool)
    for number, (first, count) in enumerate(requests):
        written[table[number]] = (np.arange(pages_each * page) < first + count).reshape(pages_each, page, 1, 1)
    k, v = (jnp.where(written, cache, jnp.nan) for cache in caches)
    sizes = {"pages": pages, "page": page, "requests": len(requests), "request_pages": pages_each}
    program = paged_attention_program(T, H, K, D, **sizes, scale=0.125, split=split, staged_weights=True, **options)
    (out,) = run(program, q, k, v, *map(jnp.asarray, (table, owner, positions)))
    for number, (first, count) in enumerate(requests):
        keys, values = (cache[table[number]].reshape(-1, K, D)[: first + count] for cache in (k, v))
        for head in range(K):
            heads = slice(head * H // K, (head + 1) * H // K)
            expected = _attention(q[rows[number], heads], keys[:, head], values[:, head])
            close(out[rows[number], heads], expected, 2e-2)
    assert bool((out[owner < 0] == 0).all())
