"""Log-probabilities on a card: right, row-invariant, and the trainer's fused form equal to the engine's rows."""

import pytest
import torch
from gpu_tools import assert_equal_bits, launcher, normal

from pallas_kernels.lm_head.hopper import log_prob_rows_program, token_log_probs_program

H = 512


SIZES = [(49216, 49159), (152064, 151936), (151936, 151936)]
#: No multiple of 8, up to the largest in use: the last rows of the weight are read from their padded copy.
ODD_SIZES = [(5, 5), (97, 97), (2003, 1999), (262145, 262145)]


@pytest.mark.parametrize(("rows", "vocab"), SIZES + ODD_SIZES)
def test_fused_targets_equal_rows_of_every_batch_size(compiler, rows, vocab):
    T = 256
    x, w = normal(T, H, seed=1), normal(rows, H, seed=2, scale=0.1)
    # Padding rows of the weight must not count, whatever they hold.
    w[vocab:] = 100.0
    targets = torch.randint(vocab, (T,), device="cuda", dtype=torch.int32)
    targets[:2] = torch.tensor([0, vocab - 1])
    picked = torch.arange(T, device="cuda"), targets.long()
    fused_of = launcher(compiler, token_log_probs_program(T, H, rows, vocab_size=vocab))
    rows_of = {few: launcher(compiler, log_prob_rows_program(few, H, rows, vocab_size=vocab)) for few in (8, 64, 256)}
    for temperature in (0.6, 1.0, 1.3):
        heat = torch.tensor(temperature, device="cuda")
        fused = fused_of(x, w, targets, heat)[0]
        reference = torch.log_softmax((x.float() @ w[:vocab].float().T) / temperature, -1)
        assert float((fused - reference[picked]).abs().max()) < 2e-3
        for few, run in rows_of.items():
            for first in (0, T - few):
                part = slice(first, first + few)
                out = run(x[part].clone(), w, heat)[0]
                assert float((out - reference[part]).abs().max()) < 2e-3
                found = out[torch.arange(few, device="cuda"), targets[part].long()]
                assert_equal_bits(found, fused[part], f"{few} rows from {first} at {temperature}")


@pytest.mark.parametrize("vocab", [97, 50257])
def test_weights_whose_last_rows_are_copied_give_the_bits_of_weights_that_need_no_copy(compiler, vocab):
    T, rows = 256, -(-vocab // 8) * 8
    x, padded = normal(T, H, seed=5), normal(rows, H, seed=6, scale=0.1)
    padded[vocab:] = float("nan")
    w, heat = padded[:vocab].clone(), torch.tensor(0.7, device="cuda")
    targets = torch.randint(vocab, (T,), device="cuda", dtype=torch.int32)
    for make, operands in ((log_prob_rows_program, ()), (token_log_probs_program, (targets,))):
        copied, whole = (
            launcher(compiler, make(T, H, len(weights), vocab_size=vocab))(x, weights, *operands, heat)[0]
            for weights in (w, padded)
        )
        assert_equal_bits(copied, whole, make.__name__)
    few = launcher(compiler, log_prob_rows_program(8, H, vocab, vocab_size=vocab))(x[:8].clone(), w, heat)[0]
    many = launcher(compiler, log_prob_rows_program(T, H, vocab, vocab_size=vocab))(x, w, heat)[0]
    assert_equal_bits(few, many[:8], "8 rows against 256")


def test_a_logit_that_is_not_finite_spoils_its_whole_row_and_no_other(compiler):
    x, w = normal(8, H, seed=3), normal(1024, H, seed=4)
    x[3] = float("nan")
    heat = torch.tensor(1.0, device="cuda")
    out = launcher(compiler, log_prob_rows_program(8, H, 1024, vocab_size=1000))(x, w, heat)[0]
    assert bool(out[3].isnan().all())
    assert bool(out[[0, 1, 2, 4, 5, 6, 7]].isfinite().all())
