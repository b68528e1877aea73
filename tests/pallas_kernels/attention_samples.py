"""Random packed and paged attention inputs that hold the same keys and values."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import region_reference as reference
from region_samples import normal

import pallas_kernels as pk

BUCKETS = (16, 320)


class Packed(NamedTuple):
    """Queries [S, H, D], keys and values [S, K, D] of one sequence, in NumPy."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def sequence(seed, length, heads=4, key_heads=2, head=64, dtype=jnp.bfloat16) -> Packed:
    rng = np.random.default_rng(seed)
    shapes = ((length, heads, head), (length, key_heads, head), (length, key_heads, head))
    return Packed(*(np.asarray(normal(rng, shape, dtype)) for shape in shapes))


def bucket(tokens):
    """Token counts are padded to a few sizes with dead rows, as an engine does; tests compile less."""
    return next((size for size in BUCKETS if tokens <= size), tokens)


def packed_attention(sequences, split=512, layer=0):
    """`attention` over sequences side by side, padding rows behind them; returns one result a sequence."""
    lengths = [sequence.q.shape[0] for sequence in sequences]
    padding = bucket(sum(lengths)) - sum(lengths)
    columns = [np.concatenate([np.asarray(part) for part in parts]) for parts in zip(*sequences, strict=True)]
    columns = [np.pad(column, ((0, padding), (0, 0), (0, 0)), constant_values=np.nan) for column in columns]
    positions = np.concatenate([*(np.arange(length) for length in lengths), np.zeros(padding)]).astype(np.int32)
    segments = np.concatenate([*(np.full(n, i) for i, n in enumerate(lengths)), np.full(padding, -1)]).astype(np.int32)
    scale = columns[0].shape[-1] ** -0.5
    columns = [jnp.asarray(column) for column in columns]
    out = pk.attention(*columns, jnp.asarray(positions), jnp.asarray(segments), layer, scale=scale, split=split)
    out = np.asarray(out)
    assert not out[sum(lengths) :].astype(np.float32).any()
    ends = np.cumsum(lengths)
    return [out[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def paged_attention(chunks, page=16, split=512, as_int16=True, seed=0):
    """`paged_attention` for chunks of (sequence, first query, one past the last); all that was never written is NaN.

    Pages are dealt out in random order. Returns one result a chunk.
    """
    dtype = chunks[0][0].k.dtype
    counts = [-(-stop // page) for _, _, stop in chunks]
    rows, width = (4, -(-640 // page)) if len(chunks) <= 4 and max(counts) * page <= 640 else (32, max(counts))
    pages = np.random.default_rng(seed).permutation(max(sum(counts), 2 * width) + 3)
    shape = (pages.size, page, *chunks[0][0].k.shape[1:])
    caches = [np.full(shape, np.nan, reference.BF16 if dtype == jnp.bfloat16 else np.float32) for _ in range(2)]
    table = np.full((rows, width), pages[-1], np.int32)
    used = 0
    for row, ((own, _, stop), count) in enumerate(zip(chunks, counts, strict=True)):
        table[row, :count] = pages[used : used + count]
        used += count
        at = np.arange(stop)
        for cache, values in zip(caches, (own.k, own.v), strict=True):
            cache[table[row, at // page], at % page] = np.asarray(values)[:stop]
    sizes = [stop - start for _, start, stop in chunks]
    dead = bucket(sum(sizes)) - sum(sizes)
    q = np.concatenate([np.asarray(own.q)[start:stop] for own, start, stop in chunks])
    q = np.pad(q, ((0, dead), (0, 0), (0, 0)), constant_values=np.nan)
    requests = np.concatenate([*(np.full(n, i) for i, n in enumerate(sizes)), np.full(dead, -1)]).astype(np.int32)
    positions = np.concatenate([*(np.arange(a, b) for _, a, b in chunks), np.zeros(dead)]).astype(np.int32)
    if as_int16 and dtype == jnp.bfloat16:
        caches = [cache.view(np.int16) for cache in caches]
    operands = [jnp.asarray(operand) for operand in (q, *caches, table, requests, positions)]
    out = np.asarray(pk.paged_attention(*operands, scale=q.shape[-1] ** -0.5, split=split))
    assert not out[sum(sizes) :].astype(np.float32).any()
    ends = np.cumsum(sizes)
    return [out[end - size : end] for size, end in zip(sizes, ends, strict=True)]
