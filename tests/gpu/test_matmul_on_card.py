"""The sealed matmul on a card: right, row-invariant over every form and tile, and folded as declared."""

import itertools

import pytest
import torch
from gpu_tools import assert_equal_bits, hazardous, launcher, normal, relative_error

from pallas_kernels.gated_matmul.hopper import gated_matmul_program
from pallas_kernels.matmul.hopper import matmul_program
from pallas_kernels.matmul.hopper_cluster import ClusterTile
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import SmallTile
from pallas_kernels.swiglu.hopper import swiglu_program

N, K = 1024, 2048
LARGE = [
    LargeTile(),
    LargeTile(split="columns"),
    LargeTile(rows=128, columns=128, stages=4),
    LargeTile(rows=64, columns=256, stages=3),
    LargeTile(rows=64, columns=64, depth=128, stages=3, group=1),
    LargeTile(cluster=2),
]
SMALL = [
    SmallTile(stages=4),
    SmallTile(stages=4, columns=8),
    SmallTile(stages=4, columns=64),
    SmallTile(warpgroups=2, stages=3),
    SmallTile(depth=64, stages=8),
    SmallTile(rows=48),
    SmallTile(rows=32, depth=64),
    SmallTile(rows=16, parallel=2, stages=3),
    SmallTile(parallel=2, stages=3),
    SmallTile(parallel=4, stages=2),
    SmallTile(parallel=2, warpgroups=2, depth=64, stages=4),
]
CLUSTER = [
    ClusterTile(parallel=2),
    ClusterTile(parallel=2, split="columns", columns=64, stages=6),
    ClusterTile(parallel=4),
    ClusterTile(parallel=4, columns=64, group=1),
]
#: Wider warpgroup tiles leave no room for the waiting sums.
LARGEST_COLUMNS = {1: 256, 2: 128, 4: 128, 8: 64}


def _fold(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("make", [normal, hazardous])
def test_every_form_and_tile_gives_a_row_the_same_bits(compiler, leaves, make):
    x, w = make(1024, K, seed=1), make(N, K, seed=2)
    expected = launcher(compiler, matmul_program(1024, N, K, leaves=leaves))(x, w)[0]
    if make is normal:
        assert relative_error(expected, x.float() @ w.float().T) < 4e-3
    forms = [*itertools.product((1024, 136, 8), LARGE), *itertools.product((128, 64, 24, 8), SMALL)]
    forms += [
        (T, tile)
        for T, tile in itertools.product((1024, 136, 8), CLUSTER)
        if leaves in (tile.parallel, 2 * tile.parallel)
    ]
    ran = 0
    for T, tile in forms:
        if isinstance(tile, SmallTile) and leaves % tile.parallel:
            continue
        if isinstance(tile, LargeTile) and tile.rows * tile.columns > 64 * LARGEST_COLUMNS[leaves]:
            continue
        if (T, leaves, tile) == (128, 8, SmallTile(warpgroups=2, stages=3)):
            with pytest.raises(ValueError, match="does not fit twice beside"):
                matmul_program(T, N, K, leaves=leaves, tile=tile)
            continue
        run = launcher(compiler, matmul_program(T, N, K, leaves=leaves, tile=tile))
        for first in (0, 1024 - T):
            found = run(x[first : first + T].clone(), w)[0]
            assert_equal_bits(found, expected[first : first + T], f"T={T} rows from {first}, {tile}")
        ran += 1
    assert ran == {1: 46, 2: 58, 4: 68, 8: 52}[leaves]


@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_leaves_fold_as_the_declared_tree(compiler, leaves):
    x, w = normal(256, K, seed=3), normal(N, K, seed=4)
    width = K // leaves
    part = launcher(compiler, matmul_program(256, N, width, out_dtype="float32"))
    cuts = [slice(i * width, (i + 1) * width) for i in range(leaves)]
    parts = [part(x[:, cut].contiguous(), w[:, cut].contiguous())[0] for cut in cuts]
    declared = _fold(parts).bfloat16()
    found = launcher(compiler, matmul_program(256, N, K, leaves=leaves))(x, w)[0]
    assert_equal_bits(found, declared, f"{leaves} leaves")
    if leaves > 2:
        in_turn = parts[0]
        for part_sum in parts[1:]:
            in_turn = in_turn + part_sum
        assert not torch.equal(in_turn.bfloat16(), declared), "the planted wrong order was not caught"


@pytest.mark.parametrize(("N", "K"), [(576, 576), (960, 1536), (1088, 64)])
def test_shapes_that_fill_no_tile_are_right(compiler, N, K):
    x, w = normal(264, K, seed=11), normal(N, K, seed=12)
    large = launcher(compiler, matmul_program(264, N, K))(x, w)[0]
    assert relative_error(large, x.float() @ w.float().T) < 4e-3
    for tile in (SmallTile(depth=64), SmallTile(depth=64, warpgroups=2)):
        small = launcher(compiler, matmul_program(72, N, K, tile=tile))(x[:72].clone(), w)[0]
        assert_equal_bits(small, large[:72], f"{tile}")


@pytest.mark.parametrize("T", [8, 64, 256])
def test_bias_is_added_after_the_round(compiler, T):
    x, w, bias = normal(T, K, seed=5), normal(N, K, seed=6), normal(N, seed=7, scale=30.0)
    plain = launcher(compiler, matmul_program(T, N, K))(x, w)[0]
    found = launcher(compiler, matmul_program(T, N, K, bias=True))(x, w, bias)[0]
    assert_equal_bits(found, (plain.float() + bias.float()).bfloat16(), "bias")


GATED_LARGE = [
    LargeTile(columns=64),
    LargeTile(columns=96),
    LargeTile(columns=192, group=1),
    LargeTile(columns=256, stages=3),
    LargeTile(rows=128, columns=192),
    LargeTile(cluster=2),
]


@pytest.mark.parametrize("make", [normal, hazardous])
def test_gate_and_up_in_one_kernel_have_the_bits_of_matmul_and_swiglu(compiler, make):
    x, w = make(1024, K, seed=13), normal(2 * N, K, seed=14, scale=K**-0.5)
    wide = launcher(compiler, matmul_program(1024, 2 * N, K))(x, w)[0]
    expected = launcher(compiler, swiglu_program(1024, N))(wide)[0]
    exchanged = launcher(compiler, gated_matmul_program(1024, N, K))(x, w.roll(N, 0))[0]
    assert not torch.equal(exchanged, expected), "the planted exchange of gate and up was not caught"
    for T, tile in itertools.product((1024, 136, 64, 8), [None, *GATED_LARGE]):
        run = launcher(compiler, gated_matmul_program(T, N, K, tile=tile))
        for first in (0, 1024 - T):
            found = run(x[first : first + T].clone(), w)[0]
            assert_equal_bits(found, expected[first : first + T], f"T={T} rows from {first}, {tile}")


@pytest.mark.parametrize(("I", "K"), [(384, 576), (1536, 576), (640, 64)])
def test_gated_shapes_that_fill_no_tile_are_right(compiler, I, K):  # noqa: E741
    x, w = normal(264, K, seed=15), normal(2 * I, K, seed=16, scale=K**-0.5)
    wide = launcher(compiler, matmul_program(264, 2 * I, K))(x, w)[0]
    expected = launcher(compiler, swiglu_program(264, I))(wide)[0]
    for T in (8, 64, 264):
        found = launcher(compiler, gated_matmul_program(T, I, K))(x[:T].clone(), w)[0]
        assert_equal_bits(found, expected[:T], f"T={T}, I={I}, K={K}")


def test_a_graph_replays_the_same_bits_with_new_inputs(compiler):
    run = launcher(compiler, matmul_program(64, N, K, leaves=4))
    static, w = normal(64, K, seed=8), normal(N, K, seed=9)
    run(static, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, w)[0]
    for seed in (8, 10):
        fresh = normal(64, K, seed=seed)
        static.copy_(fresh)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal_bits(out, run(fresh, w)[0], f"replay with seed {seed}")
