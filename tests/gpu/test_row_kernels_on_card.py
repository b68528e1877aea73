"""Norms, rotary embedding, SwiGLU and the residual sum on a card: right, and a row's bits never move."""

import pytest
import torch
from gpu_tools import assert_equal_bits, hazardous, launcher, normal, relative_error

from pallas_kernels.qk_norm_rope.hopper import paged_qk_norm_rope_program, qk_norm_rope_program
from pallas_kernels.residual_add.hopper import residual_add_program
from pallas_kernels.rms_norm.hopper import add_rms_norm_program, rms_norm_program
from pallas_kernels.swiglu.hopper import swiglu_program

EPS = 1e-6


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16() * w


@pytest.mark.parametrize("H", [576, 1024, 4096])
def test_norms_are_right_and_row_invariant(compiler, H):
    x, residual, w = normal(264, H, seed=1), normal(264, H, seed=2), normal(H, seed=3)
    whole = launcher(compiler, rms_norm_program(264, H, eps=EPS))(x, w)[0]
    assert relative_error(whole, _norm(x, w)) < 1e-3
    normed, total = launcher(compiler, add_rms_norm_program(264, H, eps=EPS))(x, residual, w)
    assert_equal_bits(total, x + residual, "the residual sum")
    assert relative_error(normed, _norm(x + residual, w)) < 1e-3
    alone = launcher(compiler, rms_norm_program(264, H, eps=EPS))(total, w)[0]
    assert_equal_bits(alone, normed, "fused against alone")
    for T in (1, 2, 8, 33):
        run = launcher(compiler, rms_norm_program(T, H, eps=EPS))
        for first in (0, 100, 264 - T):
            assert_equal_bits(run(x[first : first + T].clone(), w)[0], whole[first : first + T], f"{T} rows")


def test_the_residual_sum_rounds_ties_to_even(compiler):
    x = torch.full((8, 576), 1.0, dtype=torch.bfloat16, device="cuda")
    tie = torch.full((8, 576), 2.0**-8, dtype=torch.bfloat16, device="cuda")
    run = launcher(compiler, residual_add_program(8, 576))
    assert bool((run(x, tie)[0] == 1.0).all())
    x = hazardous(8, 576, seed=1)
    assert_equal_bits(run(x, hazardous(8, 576, seed=2))[0], x + hazardous(8, 576, seed=2), "hazards")


@pytest.mark.parametrize("I", [384, 1536, 12288])
def test_swiglu_is_right_and_row_invariant(compiler, I):  # noqa: E741
    gate_up = normal(72, 2 * I, seed=4, scale=3.0)
    whole = launcher(compiler, swiglu_program(72, I))(gate_up)[0]
    silu = torch.nn.functional.silu(gate_up[:, :I].float()).bfloat16()
    assert relative_error(whole, silu * gate_up[:, I:]) < 1e-3
    for T in (1, 8):
        run = launcher(compiler, swiglu_program(T, I))
        assert_equal_bits(run(gate_up[5 : 5 + T].clone())[0], whole[5 : 5 + T], f"{T} rows")


def _rope(x: torch.Tensor, table: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    x = _norm(x, w).float() if w is not None else x.float()
    half = x.shape[-1] // 2
    first, second, cos, sin = x[..., :half], x[..., half:], table[:, None, :half], table[:, None, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()


@pytest.mark.parametrize("D", [64, 80, 128, 256])
@pytest.mark.parametrize("norm", [True, False])
def test_rotary_embedding_is_right_and_row_invariant(compiler, D, norm):
    T, N, K = 136, 6, 2
    qkv = normal(T, (N + 2 * K) * D, seed=5)
    angles = torch.rand(T, D // 2, device="cuda") * 100
    table = torch.cat([angles.cos(), angles.sin()], -1)
    weights = (normal(D, seed=7), normal(D, seed=8)) if norm else ()
    found = launcher(compiler, qk_norm_rope_program(T, N, K, D, norm=norm, eps=EPS))(qkv, table, *weights)
    q, k, v = qkv.view(T, -1, D).split((N, K, K), dim=1)
    assert_equal_bits(found[2], v, "values")
    for out, x, w in zip(found[:2], (q, k), weights or (None, None), strict=True):
        assert relative_error(out, _rope(x, table, w)) < 1e-3
    for few in (1, 8, 24, 64):
        run = launcher(compiler, qk_norm_rope_program(few, N, K, D, norm=norm, eps=EPS))
        part = slice(70, 70 + few)
        for out, whole in zip(run(qkv[part].clone(), table[part].clone(), *weights), found, strict=True):
            assert_equal_bits(out, whole[part], f"{few} tokens")


@pytest.mark.parametrize(
    ("T", "D", "pages", "page"),
    [(8, 64, 9, 16), (136, 80, 40, 16), (40, 256, 3, 128), (16, 128, 40, 16), (72, 128, 2**20, 16)],
)
@pytest.mark.parametrize("norm", [True, False])
def test_keys_and_values_reach_their_rows_of_the_cache_and_no_others(compiler, T, D, pages, page, norm):
    N, K = 6, 2
    qkv = normal(T, (N + 2 * K) * D, seed=5)
    angles = torch.rand(T, D // 2, device="cuda") * 100
    table = torch.cat([angles.cos(), angles.sin()], -1)
    weights = (normal(D, seed=7), normal(D, seed=8)) if norm else ()
    q, k, v = launcher(compiler, qk_norm_rope_program(T, N, K, D, norm=norm, eps=EPS))(qkv, table, *weights)
    # As vLLM lays a cache out: a block is a page of keys, then one of values. The last rows are beyond 2^31 elements.
    blocks = torch.full((pages + 1, page, K, D), float("nan"), device="cuda", dtype=torch.bfloat16)
    caches = blocks[:-1], blocks[1:]
    order = torch.randperm(min(T, pages // 2 * page), generator=torch.Generator().manual_seed(2))
    slots = (pages // 2 * page - 1 - order).to("cuda")
    slots = slots + slots // page * page
    slots[::3] = -1
    program = paged_qk_norm_rope_program(T, N, K, D, pages=max(pages, 2**16), page=page, norm=norm, eps=EPS)
    found = launcher(compiler, program)(qkv, table, slots.int(), *caches, *weights)
    assert_equal_bits(found[0], q, "queries")
    kept = slots >= 0
    for cache, rows, what in zip(caches, (k, v), ("keys", "values"), strict=True):
        assert_equal_bits(cache.view(-1, K, D)[slots[kept]], rows[kept], what)
    written = int((~blocks.isnan()).sum()) if pages < 2**16 else 2 * int(kept.sum()) * K * D
    assert written == 2 * int(kept.sum()) * K * D, "something else of the cache was written"
