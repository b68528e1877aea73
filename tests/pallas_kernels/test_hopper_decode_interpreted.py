"""Attention of decode steps, its source run in Pallas's GPU interpreter: the bits of any step's, and no data race."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_samples import normal, run

pytestmark = [pytest.mark.sealing, pytest.mark.slow, pytest.mark.long_file(35)]


@pytest.mark.parametrize(
    ("head", "page", "options"),
    [(64, 16, {"blocks": 3}), (64, 64, {"blocks": 40, "scratch_bytes": 0})],
    ids=str,
)
def test_a_decode_step_without_tiles_gives_the_same_bits(head, page, options):
    """Padding before, between and behind single tokens; rows of a request with several tokens are another program's."""
    from pallas_kernels.attention.hopper import paged_attention_program

    H, K, pages_each, T = 2, 1, -(-160 // page), 16
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
