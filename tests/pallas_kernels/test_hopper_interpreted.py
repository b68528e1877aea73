"""The real kernel sources, run in Pallas's GPU interpreter on small shapes: right, and free of data races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.region import REGIONS

pytestmark = [pytest.mark.sealing, pytest.mark.slow]


def _run(program, *operands, races=True):
    # Imports what only the sealing JAX has.
    from interpreted import interpret

    return interpret(program, *operands, races=races)


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _close(found, expected, tolerance=1e-2):
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def _matmul_tiles():
    from pallas_kernels.matmul.hopper_cluster import ClusterTile
    from pallas_kernels.matmul.hopper_large import LargeTile
    from pallas_kernels.matmul.hopper_small import SmallTile

    return {
        "small": (8, SmallTile(depth=64, stages=3)),
        "small, two warpgroups": (8, SmallTile(depth=64, stages=3, warpgroups=2)),
        "small, leaves over two blocks": (8, SmallTile(depth=64, stages=2, parallel=2)),
        "two blocks fold each other's columns": (72, ClusterTile(stages=2)),
        "large": (72, LargeTile(stages=3)),
        "large, split along columns": (72, LargeTile(stages=3, columns=64, split="columns")),
        "large, two blocks that share weights": (72, LargeTile(stages=3, cluster=2)),
    }


@pytest.mark.parametrize(
    "form",
    [
        "small",
        "small, two warpgroups",
        "large",
        "large, split along columns",
        "large, two blocks that share weights",
    ],
)
def test_matmul(form):
    from pallas_kernels.matmul.hopper import matmul_program

    T, tile = _matmul_tiles()[form]
    x, w, bias = _normal(0, T, 512), _normal(1, 128, 512), _normal(2, 128)
    (out,) = _run(matmul_program(T, 128, 512, leaves=4, bias=True, tile=tile), x, w, bias)
    _close(out, x.astype(jnp.float32) @ w.astype(jnp.float32).T + bias.astype(jnp.float32))


@pytest.mark.parametrize("form", ["small, leaves over two blocks", "two blocks fold each other's columns"])
def test_partial_sums_sent_to_another_block_cannot_be_interpreted(form):
    """The interpreter has no rule for `async_store_smem`; on a card the matmul's own tests compare this form's bits."""
    from pallas_kernels.matmul.hopper import matmul_program

    T, tile = _matmul_tiles()[form]
    with pytest.raises(TypeError, match="ref must be a reference"):
        _run(matmul_program(T, 128, 512, leaves=4, tile=tile), _normal(0, T, 512), _normal(1, 128, 512))


def test_a_tile_that_is_read_before_its_copy_has_arrived_is_a_race(monkeypatch):
    """The planted fault: one kernel's only wait is left out. The same kernel with it is in the heads' test below."""
    from interpreted import RaceFound

    from pallas_kernels.lm_head import hopper, hopper_sums

    monkeypatch.setattr(hopper_sums, "plgpu", _WithoutWaiting(hopper_sums.plgpu))
    program = hopper.log_prob_rows_program(8, 64, 256, vocab_size=256)
    with pytest.raises(RaceFound, match="step blocks"):
        _run(program, _normal(0, 8, 64), _normal(1, 256, 64), jnp.float32(1.0))


class _WithoutWaiting:
    """Pallas whose `barrier_wait` does nothing."""

    def __init__(self, original):
        self._original = original

    def __getattr__(self, name):
        return getattr(self._original, name)

    def barrier_wait(self, barrier):
        pass


def _row_programs():
    from pallas_kernels.qk_norm_rope.hopper import qk_norm_rope_program
    from pallas_kernels.residual_add.hopper import residual_add_program
    from pallas_kernels.rms_norm.hopper import add_rms_norm_program, rms_norm_program
    from pallas_kernels.swiglu.hopper import swiglu_program

    return {
        "rms_norm": lambda: rms_norm_program(2, 256, eps=1e-6),
        "add_rms_norm": lambda: add_rms_norm_program(2, 256, eps=1e-6),
        "add_rms_norm, rows that fill no vector": lambda: add_rms_norm_program(2, 576, eps=1e-6),
        "residual_add": lambda: residual_add_program(8, 256),
        "swiglu": lambda: swiglu_program(2, 256),
        "qk_norm_rope": lambda: qk_norm_rope_program(8, 2, 1, 64, norm=True, eps=1e-6),
        "qk_norm_rope, without norms": lambda: qk_norm_rope_program(8, 2, 1, 64, norm=False, eps=1e-6),
    }


PARAMETERS = {"eps": 1e-6, "key_heads": 1}
ROWS = (
    "rms_norm",
    "add_rms_norm",
    "add_rms_norm, rows that fill no vector",
    "residual_add",
    "swiglu",
    "qk_norm_rope",
    "qk_norm_rope, without norms",
)


@pytest.mark.parametrize("case", ROWS)
def test_row_kernels_equal_the_form_for_a_cpu(case):
    program = _row_programs()[case]()
    buffers = [program.buffers[name] for name in program.operands]
    operands = [_normal(seed, *buffer.shape).astype(buffer.dtype) for seed, buffer in enumerate(buffers)]
    region = REGIONS[case.split(",")[0]]
    parameters = {name: PARAMETERS[name] for name in region.parameters}
    expected = jax.tree.leaves(jax.jit(lambda *x: region.bind(*x, **parameters))(*operands))
    for found, result in zip(_run(program, *operands), expected, strict=True):
        _close(found, result)


def _attention(q, k, v):
    """Causal attention of one key head in float32: q [N, H, D], k and v [L, D], queries last."""
    scores = jnp.einsum("nhd,ld->hnl", q.astype(jnp.float32), k.astype(jnp.float32)) * q.shape[-1] ** -0.5
    visible = jnp.arange(len(k)) <= jnp.arange(len(k) - len(q), len(k))[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("hnl,ld->nhd", weights, v.astype(jnp.float32))


def test_rotated_keys_and_values_go_to_their_rows_of_the_cache():
    from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program, qk_norm_rope_program

    T, N, K, D, page = 8, 2, 1, 64, 16
    qkv, weights = _normal(0, T, (N + 2 * K) * D), (_normal(1, D), _normal(2, D))
    angles = jax.random.uniform(jax.random.key(3), (T, D // 2)) * 9
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)
    q, k, v = _run(qk_norm_rope_program(T, N, K, D, norm=True, eps=1e-6), qkv, table, *weights)
    assert bool((v[:, 0] == qkv[:, 3 * D :]).all())
    slots = jnp.array([5, -1, 17, 40, 0, 2, 31, 16], jnp.int32)
    caches = [jnp.zeros((3, page, K, D), jnp.bfloat16)] * 2
    program = paged_qk_norm_rope_program(T, N, K, D, pages=3, page=page, norm=True, eps=1e-6)
    found = _run(program, qkv, table, slots, *caches, *weights)
    assert bool((found[0] == q).all())
    for cache, rows in zip(found[1:], (k, v), strict=True):
        assert bool((cache.reshape(-1, K, D)[slots[slots >= 0]] == rows[slots >= 0]).all())


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
    q, k, v = _normal(0, T, 2, D), _normal(1, T, 1, D), _normal(2, T, 1, D)
    program = attention_program(T, 2, 1, D, scale=0.125, split=256, staged_weights=True)
    (out,) = _run(program, q, k, v, jnp.asarray(positions), jnp.asarray(segments), jnp.int32(0))
    for first, length in zip((0, 40), lengths, strict=True):
        rows = slice(first, first + length)
        _close(out[rows], _attention(q[rows], k[rows, 0], v[rows, 0]), 2e-2)
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


@pytest.mark.parametrize("at", [506, 511])
def test_single_tokens_of_a_batch_that_is_looked_up_in_turns(at):
    _check_attention_over_pages([(40, 1), (129, 1), (3, 5), (255, 1)], at, 528, 128, {"blocks": 2})


def _check_attention_over_pages(requests, at, T, split, options):
    """``at``: the first row of the batch that is not padding."""
    from pallas_kernels.attention.hopper import paged_attention_program

    H, K, D, page, pages_each = 2, 2, 64, 128, 5
    owner, positions, rows = np.full(T, -1, np.int32), np.zeros(T, np.int32), []
    for number, (first, count) in enumerate(requests):
        rows.append(slice(at, at + count))
        owner[rows[-1]], positions[rows[-1]] = number, np.arange(first, first + count)
        at += count + 2 * (count > 1)
    pages = pages_each * len(requests)
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(len(requests), pages_each)
    q, k, v = _normal(0, T, H, D), _normal(1, pages, page, K, D), _normal(2, pages, page, K, D)
    sizes = {"pages": pages, "page": page, "requests": len(requests), "request_pages": pages_each}
    program = paged_attention_program(T, H, K, D, **sizes, scale=0.125, split=split, staged_weights=True, **options)
    (out,) = _run(program, q, k, v, *map(jnp.asarray, (table, owner, positions)))
    for number, (first, count) in enumerate(requests):
        keys, values = (cache[table[number]].reshape(-1, K, D)[: first + count] for cache in (k, v))
        for head in range(K):
            heads = slice(head * H // K, (head + 1) * H // K)
            expected = _attention(q[rows[number], heads], keys[:, head], values[:, head])
            _close(out[rows[number], heads], expected, 2e-2)
    assert bool((out[owner < 0] == 0).all())


@pytest.mark.parametrize("vocab", [333, 29])
def test_both_heads_over_an_odd_vocabulary(vocab):
    """That both give the same bits is a matter of the card's arithmetic, and tested there."""
    from pallas_kernels.lm_head.hopper import log_prob_rows_program, token_log_probs_program

    x, w, heat = _normal(0, 128, 64), _normal(1, vocab, 64), jnp.float32(1.3)
    targets = jnp.asarray(np.random.default_rng(0).integers(0, vocab, 128), jnp.int32)
    expected = jax.nn.log_softmax((x.astype(jnp.float32) @ w.astype(jnp.float32).T) / 1.3)
    (rows,) = _run(log_prob_rows_program(8, 64, vocab, vocab_size=vocab), x[:8], w, heat)
    _close(rows, expected[:8], 1e-5)
    (tokens,) = _run(token_log_probs_program(128, 64, vocab, vocab_size=vocab), x, w, targets, heat)
    _close(tokens, expected[np.arange(128), targets], 1e-5)
