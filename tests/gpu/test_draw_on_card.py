"""Draws on a card: Triton's kernels follow the probabilities, and neither batch nor repetition moves a token."""

import pytest
import torch

from bridge.device_sampling import _drawn, draw_rows


def _rows(count: int, vocabulary: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    log_probs = torch.log_softmax(torch.randn(count, vocabulary, generator=generator, device="cuda") * 3, 1)
    return log_probs, torch.rand(count, generator=generator, device="cuda", dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [1, 7, 512, 513, 49152, 151936, 262144])
def test_a_draw_is_the_plain_one_and_does_not_depend_on_its_neighbours(vocabulary):
    log_probs, u = _rows(96, vocabulary, vocabulary)
    together = draw_rows(log_probs, u, None)
    # The two exponentials differ in their last bits, by which few draws may fall on the other side of an edge.
    assert int((together != _drawn(log_probs, u)).sum()) <= 1
    alone = torch.cat([draw_rows(log_probs[row : row + 1], u[row : row + 1], None) for row in range(len(u))])
    assert together.equal(alone)
    assert together.equal(draw_rows(log_probs, u, None))


def test_draws_follow_the_probabilities():
    log_probs, _ = _rows(1, 40, 1)
    count = 1 << 16
    u = (torch.arange(count, device="cuda", dtype=torch.float64) + 0.5) / count
    drawn = draw_rows(log_probs.expand(count, -1), u, None)
    frequency = torch.bincount(drawn, minlength=40) / count
    assert float((frequency - log_probs[0].exp()).abs().max()) < 2 / count


def test_no_token_without_mass_is_drawn_and_nan_rows_give_a_token():
    log_probs, _ = _rows(2, 1000, 2)
    log_probs[:, ::2] = -torch.inf
    edges = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device="cuda")
    assert bool((draw_rows(log_probs, edges, None) % 2 == 1).all())
    found = draw_rows(torch.full_like(log_probs, torch.nan), edges, torch.tensor([False, True], device="cuda"))
    assert bool(((found >= 0) & (found < 1000)).all())
