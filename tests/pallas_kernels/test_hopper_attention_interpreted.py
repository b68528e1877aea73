"""The attention kernels' sources, run in Pallas's GPU interpreter on small shapes: right, and free of data races."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_samples import close, normal, run

pytestmark = [pytest.mark.sealing, pytest.mark.slow, pytest.mark.long_file(60)]


def _attention(q, k, v):
    """Causal attention of one key head in float32: q [N, H, D], k and v [L, D], queries last."""
    q, k, v = (np.asarray(array, np.float32) for array in (q, k, v))
    scores = np.einsum("nhd,ld->hnl", q, k) * q.shape[-1] ** -0.5
    visible = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnl,ld->nhd", weights / weights.sum(-1, keepdims=True), v)


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
    # NumPy's slices compile nothing.
    out, q, k, v = map(np.asarray, (out, q, k, v))
    for first, length in zip((0, 40), lengths, strict=True):
        rows = slice(first, first + length)
        close(out[rows], _attention(q[rows], k[rows, 0], v[rows, 0]), 2e-2)
    assert (out[69:] == 0).all()


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
    q, *caches = map(np.asarray, (normal(0, T, H, D), normal(1, pages, page, K, D), normal(2, pages, page, K, D)))
    # What nothing wrote must not matter. Copies are checked for where they come from, too.
    written = np.zeros((pages, page, 1, 1), bool)
    for number, (first, count) in enumerate(requests):
        written[table[number]] = (np.arange(pages_each * page) < first + count).reshape(pages_each, page, 1, 1)
    k, v = (np.where(written, cache, cache.dtype.type(np.nan)) for cache in caches)
    sizes = {"pages": pages, "page": page, "requests": len(requests), "request_pages": pages_each}
    program = paged_attention_program(T, H, K, D, **sizes, scale=0.125, split=split, staged_weights=True, **options)
    out = np.asarray(*run(program, *map(jnp.asarray, (q, k, v, table, owner, positions))))
    for number, (first, count) in enumerate(requests):
        keys, values = (cache[table[number]].reshape(-1, K, D)[: first + count] for cache in (k, v))
        for head in range(K):
            heads = slice(head * H // K, (head + 1) * H // K)
            expected = _attention(q[rows[number], heads], keys[:, head], values[:, head])
            close(out[rows[number], heads], expected, 2e-2)
    assert (out[owner < 0] == 0).all()
