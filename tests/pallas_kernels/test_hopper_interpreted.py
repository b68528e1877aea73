"""The real kernel sources, run in Pallas's GPU interpreter on small shapes: right, and free of data races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_samples import close, normal, run

from pallas_kernels.region import REGIONS

pytestmark = [pytest.mark.sealing, pytest.mark.slow, pytest.mark.long_file(65)]


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
    x, w, bias = normal(0, T, 512), normal(1, 128, 512), normal(2, 128)
    (out,) = run(matmul_program(T, 128, 512, leaves=4, bias=True, tile=tile), x, w, bias)
    close(out, x.astype(jnp.float32) @ w.astype(jnp.float32).T + bias.astype(jnp.float32))


@pytest.mark.parametrize("rows", [48, 32])
@pytest.mark.parametrize("T", [8, 24])
def test_few_rows_of_the_weights_a_block(T, rows):
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_small import SmallTile

    x, w = normal(0, T, 512), normal(1, 192, 512)
    (out,) = run(matmul_program(T, 192, 512, leaves=4, tile=SmallTile(rows=rows, stages=3)), x, w)
    close(out, x.astype(jnp.float32) @ w.astype(jnp.float32).T)


def test_eight_leaves_of_few_tokens():
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_small import SmallTile

    x, w = normal(0, 16, 512), normal(1, 64, 512)
    (out,) = run(matmul_program(16, 64, 512, leaves=8, tile=SmallTile(depth=64, stages=3)), x, w)
    close(out, x.astype(jnp.float32) @ w.astype(jnp.float32).T)


@pytest.mark.parametrize(
    ("T", "I", "columns"), [(8, 192, None), (8, 256, None), (72, 192, 64), (72, 192, 256), (264, 192, 192)]
)
def test_gate_and_up(T, I, columns):  # noqa: E741
    """Few tokens in two kernels where the second can; else in one, of tiles the last of which may be half there."""
    from pallas_kernels.gated_matmul.hopper import gated_matmul_program
    from pallas_kernels.matmul.hopper_large import LargeTile

    tile = LargeTile(columns=columns, rows=128 if T > 128 else 64, stages=3) if columns else None
    x, w = normal(0, T, 256), normal(1, 2 * I, 256) / 16
    (out,) = run(gated_matmul_program(T, I, 256, tile=tile), x, w)
    (expected,) = jax.tree.leaves(jax.jit(REGIONS["gated_matmul"].bind)(x, w))
    close(out, expected)


@pytest.mark.parametrize("form", ["small, leaves over two blocks", "two blocks fold each other's columns"])
def test_partial_sums_sent_to_another_block_cannot_be_interpreted(form):
    """The interpreter has no rule for `async_store_smem`; on a card the matmul's own tests compare this form's bits."""
    from pallas_kernels.matmul.hopper import matmul_program

    T, tile = _matmul_tiles()[form]
    with pytest.raises(TypeError, match="ref must be a reference"):
        run(matmul_program(T, 128, 512, leaves=4, tile=tile), normal(0, T, 512), normal(1, 128, 512))


def test_a_tile_that_is_read_before_its_copy_has_arrived_is_a_race(monkeypatch):
    """The planted fault: one kernel's only wait is left out. The same kernel with it is in the heads' test below."""
    from interpreted import RaceFound

    from pallas_kernels.lm_head import hopper, hopper_sums

    monkeypatch.setattr(hopper_sums, "plgpu", _WithoutWaiting(hopper_sums.plgpu))
    program = hopper.log_prob_rows_program(8, 64, 256, vocab_size=256)
    with pytest.raises(RaceFound, match="step blocks"):
        run(program, normal(0, 8, 64), normal(1, 256, 64), jnp.float32(1.0))


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
    operands = [normal(seed, *buffer.shape).astype(buffer.dtype) for seed, buffer in enumerate(buffers)]
    region = REGIONS[case.split(",")[0]]
    parameters = {name: PARAMETERS[name] for name in region.parameters}
    expected = jax.tree.leaves(jax.jit(lambda *x: region.bind(*x, **parameters))(*operands))
    for found, result in zip(run(program, *operands), expected, strict=True):
        close(found, result)


def test_rotated_keys_and_values_go_to_their_rows_of_the_cache():
    from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program, qk_norm_rope_program

    T, N, K, D, page = 8, 2, 1, 64, 16
    qkv, weights = normal(0, T, (N + 2 * K) * D), (normal(1, D), normal(2, D))
    angles = jax.random.uniform(jax.random.key(3), (T, D // 2)) * 9
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1)
    q, k, v = run(qk_norm_rope_program(T, N, K, D, norm=True, eps=1e-6), qkv, table, *weights)
    assert bool((v[:, 0] == qkv[:, 3 * D :]).all())
    slots = jnp.array([5, -1, 17, 40, 0, 2, 31, 16], jnp.int32)
    caches = [jnp.zeros((3, page, K, D), jnp.bfloat16)] * 2
    program = paged_qk_norm_rope_program(T, N, K, D, pages=3, page=page, norm=True, eps=1e-6)
    found = run(program, qkv, table, slots, *caches, *weights)
    assert bool((found[0] == q).all())
    for cache, rows in zip(found[1:], (k, v), strict=True):
        assert bool((cache.reshape(-1, K, D)[slots[slots >= 0]] == rows[slots >= 0]).all())


@pytest.mark.parametrize("vocab", [333, 29])
def test_both_heads_over_an_odd_vocabulary(vocab):
    """That both give the same bits is a matter of the card's arithmetic, and tested there."""
    from pallas_kernels.lm_head.hopper import log_prob_rows_program, token_log_probs_program

    x, w, heat = normal(0, 128, 64), normal(1, vocab, 64), jnp.float32(1.3)
    targets = jnp.asarray(np.random.default_rng(0).integers(0, vocab, 128), jnp.int32)
    expected = jax.nn.log_softmax((x.astype(jnp.float32) @ w.astype(jnp.float32).T) / 1.3)
    (rows,) = run(log_prob_rows_program(8, 64, vocab, vocab_size=vocab), x[:8], w, heat)
    close(rows, expected[:8], 1e-5)
    (tokens,) = run(token_log_probs_program(128, 64, vocab, vocab_size=vocab), x, w, targets, heat)
    close(tokens, expected[np.arange(128), targets], 1e-5)
