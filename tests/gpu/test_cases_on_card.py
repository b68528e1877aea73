"""Faults that others met, as small inputs for the kernels on a card; each with the numbers of the report."""

import itertools

import pytest
import torch
from gpu_tools import assert_equal_bits, launcher, normal
from test_attention_on_card import Batch

from pallas_kernels.lm_head.hopper import log_prob_rows_program
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.qk_norm_rope.hopper import qk_norm_rope_program
from pallas_kernels.rms_norm.hopper import add_rms_norm_program
from pallas_kernels.swiglu.hopper import swiglu_program

H, K, D = 14, 2, 64


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("history", [129, 19802])
def test_a_neighbours_longer_prefill_moves_nothing(compiler, page, history):
    """vllm#51902: the attention tile changed when a neighbour's prefill grew from 9 to 10 tokens."""
    batch = Batch([history, 10], H, K, D)
    expected = batch.packed(compiler)[batch.rows(0, history - 1, history)]
    for neighbour in (9, 10):
        found = batch.paged(compiler, [(0, history - 1, history), (1, 0, neighbour)], page, 16)
        assert_equal_bits(found[:1], expected, f"beside a prefill of {neighbour}")
    assert_equal_bits(batch.paged(compiler, [(0, history - 1, history)], page, 8)[:1], expected, "alone")


def test_queries_of_length_one_stay_causal(compiler):
    """vllm-flash-attn#169: the causal flag was dropped when every query has length 1."""
    batch = Batch([300, 129], H, K, D)
    # Keys behind the query exist in the cache and must not be seen.
    middle = (0, 99, 100)
    expected = batch.packed(compiler)[batch.rows(0, 99, 100)]
    assert_equal_bits(batch.paged(compiler, [middle], 16, 8)[:1], expected, "one decode alone")
    assert_equal_bits(batch.paged(compiler, [middle, (1, 0, 129)], 16, 136)[:1], expected, "beside a prefill of 129")


def test_thirty_short_requests_move_nothing(compiler):
    """flashinfer#2424: the query tile was chosen by the batch."""
    batch = Batch([700, *[3 + number % 5 for number in range(30)]], H, K, D)
    wanted = [(0, 690, 700), *[(number, 0, batch.lengths[number]) for number in range(1, 31)]]
    alone = batch.paged(compiler, wanted[:1], 16, 16)
    together = batch.paged(compiler, wanted, 16, 168)
    assert_equal_bits(together[:10], alone[:10], "one long request")
    assert_equal_bits(alone[:10], batch.packed(compiler)[batch.rows(0, 690, 700)], "against packed")


def test_buckets_graphs_and_eager_agree_on_either_side_of_every_bucket(compiler):
    """Megatron#6521 and vllm#55752: buckets, graphs and a dead row fell into another class of bits."""
    N, inner = 256, 512
    x, w = normal(72, inner, seed=1), normal(N, inner, seed=2)
    whole = launcher(compiler, matmul_program(72, N, inner, leaves=4))(x, w)[0]
    for bucket in (8, 32, 64):
        run = launcher(compiler, matmul_program(bucket, N, inner, leaves=4))
        for count in (1, 2, bucket - 1, bucket):
            # What a dead row holds must not matter.
            padded = torch.full((bucket, inner), float("nan"), device="cuda", dtype=torch.bfloat16)
            padded[:count] = x[:count]
            assert_equal_bits(run(padded, w)[0][:count], whole[:count], f"{count} rows in a bucket of {bucket}")
        graph = torch.cuda.CUDAGraph()
        given = x[:bucket].clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = run(given, w)[0]
        given.copy_(x[72 - bucket :])
        graph.replay()
        assert_equal_bits(captured, whole[72 - bucket :], f"a graph of {bucket}")


def test_rows_a_block_of_the_norms_do_not_depend_on_the_rows(compiler):
    """sglang#27869: rows per block depended on M."""
    x, residual, w = normal(33, 576, seed=1), normal(33, 576, seed=2), normal(576, seed=3)
    whole = launcher(compiler, add_rms_norm_program(33, 576, eps=1e-5))(x, residual, w)
    for rows in (1, 2, 32):
        found = launcher(compiler, add_rms_norm_program(rows, 576, eps=1e-5))(
            x[:rows].clone(), residual[:rows].clone(), w
        )
        for name, one, all_rows in zip(("normed", "sum"), found, whole, strict=True):
            assert_equal_bits(one, all_rows[:rows], f"{name} of {rows} rows")


def test_the_order_of_overlapping_prompts_moves_nothing(compiler):
    """vllm#42019: prompt log-probabilities depended on the order of requests, through memory that nobody wrote."""
    batch = Batch([32, 32, 32], H, K, D)
    for tensor in (batch.q, batch.k, batch.v):
        # Three prompts that share their first 16 tokens.
        for number in (1, 2):
            tensor[batch.rows(number, 0, 16)] = tensor[batch.rows(0, 0, 16)]
    packed = batch.packed(compiler)
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory, "new buffers are not poisoned"
    try:
        for order in itertools.permutations(range(3)):
            out = batch.paged(compiler, [(number, 0, 32) for number in order], 16, 104)
            for place, number in enumerate(order):
                rows = batch.rows(number, 0, 32)
                assert_equal_bits(out[32 * place : 32 * place + 32], packed[rows], f"prompt {number} in order {order}")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_bits(packed[batch.rows(1, 0, 16)], packed[batch.rows(0, 0, 16)], "the shared prefix")


@pytest.mark.parametrize("position", [4095, 4097, 40_000, 131_071])
def test_the_rotation_is_right_far_behind_position_4096(compiler, position):
    """torchtitan: the table was cast to bfloat16 on one side, which is off by whole radians there."""
    inverse = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64, device="cuda") / D)
    angles = (position + torch.arange(8, dtype=torch.float64, device="cuda"))[:, None] * inverse
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    qkv = normal(8, 4 * D, seed=1)
    q = launcher(compiler, qk_norm_rope_program(8, 2, 1, D, norm=False, eps=1e-6))(qkv, table)[0].double()
    a, b = qkv.view(8, 4, D)[:, :2].double().split(D // 2, dim=2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], 2)
    assert float((q - exact).abs().max()) < 2.0**-8 * float(exact.abs().max())


def test_equal_rows_are_equal(compiler):
    """jax#26836 and jax#26795: equal rows differed although deterministic ops were on."""
    vocab, hidden, inner = 1765, 512, 384
    row = normal(1, hidden, seed=1)
    x = row.expand(16, hidden).contiguous()
    head = normal(vocab, hidden, seed=2, scale=0.1)
    if vocab % 8:
        head = torch.cat([head, torch.zeros(8 - vocab % 8, hidden, device="cuda", dtype=torch.bfloat16)])
    program = log_prob_rows_program(16, hidden, len(head), vocab_size=vocab)
    log_probs = launcher(compiler, program)(x, head, torch.tensor(1.0, device="cuda"))[0]
    assert_equal_bits(log_probs, log_probs[:1].expand(16, -1).contiguous(), "log-softmax of 16 equal rows")
    up, down = normal(2 * inner, hidden, seed=3), normal(hidden, inner, seed=4)

    def feed_forward(rows: torch.Tensor) -> torch.Tensor:
        T = len(rows)
        wide = launcher(compiler, matmul_program(T, 2 * inner, hidden))(rows, up)[0]
        gated = launcher(compiler, swiglu_program(T, inner))(wide)[0]
        return launcher(compiler, matmul_program(T, hidden, inner, leaves=4))(gated, down)[0]

    others = normal(72, hidden, seed=5)
    others[37] = row[0]
    alone = torch.cat([row, torch.zeros(7, hidden, device="cuda", dtype=torch.bfloat16)])
    assert_equal_bits(feed_forward(others)[37], feed_forward(alone)[0], "an MLP's row alone and in a batch")
    same = feed_forward(x)
    assert_equal_bits(same, same[:1].expand(16, -1).contiguous(), "an MLP of 16 equal rows")
