"""The attention benchmark: its command line, and caches that both sides read alike in every layout."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import attention


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    return attention


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("interleaved", [False, True])
def test_both_sides_read_the_same_keys_and_values(benchmark, page, interleaved):
    count, length = 3, 346
    cache = benchmark.Cache(page, interleaved, requests=5, context=1000)
    held, sizes = cache.tensors(count, length), cache.sizes(count, length)
    assert held.table.shape == (5, -(-1000 // page)) == (sizes["requests"], sizes["request_pages"])
    used = -(-length // page)
    found = []
    for ours, library in zip(held.caches, held.library_caches, strict=True):
        # What the kernels are lowered for is a bound, and every page that is named exists.
        assert len(ours) <= sizes["pages"]
        rows = ours[held.table[:count, :used].long()]
        assert torch.equal(rows, library[held.library_table[:count, :used].long()])
        found.append(rows)
    assert not torch.equal(*found)
    keys, values = (pages.data_ptr() for pages in held.caches)
    assert (values - keys == page * benchmark.K * benchmark.D * 2) == interleaved


def test_every_combination_is_measured_and_prefill_once(benchmark):
    arguments = ["out.json", "--page", "16", "64", "128", "--layout", "apart", "interleaved", "--decode-lengths", "346"]
    arguments = benchmark.parser().parse_args(arguments)
    caches = benchmark.caches(arguments)
    assert len(set(caches)) == 6
    assert [cache.named()["layout"] for cache in caches[:2]] == ["apart", "interleaved"]
    rows = benchmark.rows(caches[0], arguments.decode_lengths)
    assert ("decode", benchmark.decode, (caches[0],), 256, 346) in rows
