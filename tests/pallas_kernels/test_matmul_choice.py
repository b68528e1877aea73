"""The tile that a matmul gets on sm90, against what was measured on a card."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sealing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
FOLDER = BENCHMARKS / "results"
RESULTS = ("matmul_tiles_h200.json", "matmul_tall_h200.json")
#: How many rows of a file are of committed tiles.
COMMITTED = {
    "matmul_1b7_tiles_h200": 16,
    "matmul_eight_leaves_h200": 16,
    "matmul_few_tokens_h200": 45,
    "matmul_tall_h200": 15,
    "matmul_tiles_h200": 40,
    "matmul_turns_h200": 195,
}
#: Two runs are compared where cuBLAS took as long in both, else the card was in another state.
SAME_STATE = 0.08
#: Of the best tile's time; what a second run of the same tile may differ by.
TOLERANCE = 1.02


def _measured():
    from matmul_table import read_tile

    shapes, baselines = {}, {}
    for name in RESULTS:
        for row in json.loads((FOLDER / name).read_text(encoding="utf-8"))["rows"]:
            shape = row["T"], row["N"], row["K"], row["leaves"]
            baseline = baselines.setdefault(shape, row["cublas_us"])
            if abs(row["cublas_us"] / baseline - 1) <= SAME_STATE:
                times = shapes.setdefault(shape, {})
                tile = read_tile(row["tile"])
                times[tile] = min(row["us"], times.get(tile, row["us"]))
    return shapes


def test_the_committed_choice_is_the_best_measured_tile():
    from pallas_kernels.matmul.hopper_choice import choose_tile

    measured = _measured()
    assert len(measured) == 45
    for shape, times in measured.items():
        chosen = choose_tile(*shape)
        assert chosen in times, f"{shape}: {chosen} was not measured"
        assert times[chosen] <= TOLERANCE * min(times.values()), f"{shape}: {chosen}"


def test_the_estimate_alone_is_near_it(monkeypatch):
    from pallas_kernels.matmul import hopper_choice

    monkeypatch.setattr(hopper_choice, "MEASURED", {})
    worst = 1.0
    for shape, times in _measured().items():
        chosen = hopper_choice.choose_tile(*shape)
        if chosen in times:
            worst = max(worst, times[chosen] / min(times.values()))
    assert worst <= 1.2


def test_the_planted_tile_of_one_width_for_all_is_not():
    slow = [
        shape
        for shape, times in _measured().items()
        if any("columns=256" in repr(tile) and us > 1.5 * min(times.values()) for tile, us in times.items())
    ]
    assert (256, 6144, 4096, 1) in slow


@pytest.mark.parametrize("path", sorted(FOLDER.glob("matmul_*h200.json")), ids=lambda path: path.stem)
def test_what_the_results_call_chosen_is_what_a_call_gets(path):
    """The page shows these rows as the committed tiles."""
    from matmul_table import read_tile

    from pallas_kernels.matmul.hopper_choice import choose_tile

    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert sum(row["chosen"] for row in rows) == COMMITTED[path.stem]
    for row in rows:
        called = choose_tile(row["T"], row["N"], row["K"], row["leaves"])
        assert row["chosen"] == (read_tile(row["tile"]) == called), row


@pytest.mark.parametrize(
    ("tile", "bias", "refused"),
    [
        ({"rows": 24}, False, "rows=24 is not a multiple of 16 up to 64"),
        ({"rows": 128}, False, "rows=128 is not a multiple of 16 up to 64"),
        ({"rows": 32}, True, "rows=32 are fewer than 64"),
        ({"rows": 32, "warpgroups": 2}, False, "rows=32 are fewer than 64"),
    ],
)
def test_tiles_of_few_weight_rows_that_no_kernel_takes_are_refused(tile, bias, refused):
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_small import SmallTile

    with pytest.raises(ValueError, match=refused):
        matmul_program(8, 128, 512, bias=bias, tile=SmallTile(**tile))


def test_two_warpgroups_take_a_tile_where_a_block_has_many():
    """The vocabularies of Qwen3 and SmolLM2, Qwen3-8B's gate and up, and columns that pairs do not divide."""
    from pallas_kernels.matmul.hopper_choice import choose_tile

    def warpgroups(N, within=0):
        return choose_tile(8, N, 4096, 1, within=within).warpgroups

    assert [warpgroups(N) for N in (151936, 49152, 24576)] == [2, 1, 1]
    assert warpgroups(151936, within=256) == 2
    assert warpgroups(128 * 1200 + 64, within=128 * 1200 + 64) == 1


def test_a_bias_gets_whole_tiles():
    from pallas_kernels.matmul.hopper import matmul_program
    from pallas_kernels.matmul.hopper_choice import choose_tile
    from pallas_kernels.matmul.hopper_large import LargeTile

    for T, N in ((8, 4160), (256, 6208), (1024, 1088)):
        assert N % choose_tile(T, N, 1024, 4, within=N).block_columns == 0
        matmul_program(T, N, 1024, leaves=4, bias=True)
    with pytest.raises(ValueError, match="not a multiple of 128, and the bias"):
        matmul_program(256, 1088, 1024, leaves=4, bias=True, tile=LargeTile())


@pytest.mark.parametrize("T", [8, 64, 128, 256, 2048])
@pytest.mark.parametrize(("I", "K"), [(12288, 4096), (1536, 576), (128, 64)])
def test_gate_and_up_get_tiles_in_which_a_warpgroup_has_both(T, I, K):  # noqa: E741
    from pallas_kernels.gated_matmul.hopper import gated_matmul_program
    from pallas_kernels.matmul.hopper_choice import choose_gated_tile
    from pallas_kernels.matmul.hopper_large import LargeTile

    steps = [step.name for step in gated_matmul_program(T, I, K).steps]
    assert steps == (["matmul", "swiglu"] if T <= 64 else ["gated_matmul"])
    tile = choose_gated_tile(T, I, K)
    if I == 12288:
        # The fastest measured on an H200.
        assert (tile.rows, tile.columns) == (128 if T > 128 else 64, 192)
    with pytest.raises(ValueError, match="two products meet in"):
        gated_matmul_program(8, I, K, tile=LargeTile(split="columns"))
