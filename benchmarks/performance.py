"""Makes docs/performance.md from the result files: python benchmarks/performance.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_table import table as _table

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
#: Each with the tokens from which and below which its rows are of today's kernels.
MATMUL_FILES = {
    "matmul_few_tokens_h200.json": (0, 129),
    "matmul_h200.json": (129, 2048),
    "matmul_two_eight_leaves_h200.json": (0, 16385),
    "matmul_tiles_h200.json": (2048, 16385),
    "matmul_2048_h200.json": (2048, 16385),
}
#: What a ratio to cuBLAS should be at most, by leaves, for many tokens; for few it is 1, else `MIDDLE_AIM`.
LARGE_AIMS = {1: 1.0, 2: 1.05, 4: 1.05, 8: 1.1}
FEW_TOKENS, MIDDLE_TOKENS, MIDDLE_AIM = 64, 512, 1.05
COPY_AIM = 0.85
PREFILL_AIM, DECODE_AIM = 1.15, 1.1
#: A row of a later file stands only where no earlier one has it.
ATTENTION_FILES = tuple(f"attention_{name}h200.json" for name in ("pages_", "prefill_", "", "page16_"))
#: Each with the arms that are taken from it.
ENGINE_FILES = {
    "engine_qwen3_8b_h200.json": ("isojax",),
    "engine_qwen3_8b_batch_invariant_h200.json": ("batch_invariant",),
    "engine_qwen3_1b7_h200.json": ("isojax",),
    "engine_qwen3_1b7_llm_h200.json": ("isojax_llm",),
}
ENGINE_AIMS = {"8x8192x64": 1.05}
TRAINING_AIM = 1.05
STEP_ROWS = 12


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's text. Raises KeyError and FileNotFoundError for result files of another layout, or missing."""
    parts = [
        "# Performance",
        _INTRODUCTION,
        _engine(),
        _training(),
        _matmul(),
        _attention(),
        _rows(),
        _layer(),
        _step(),
        _launches(),
        _MISSES,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


_INTRODUCTION = """
Made by `benchmarks/performance.py` from the files in `benchmarks/results/`, which hold card, versions, date and
command. Do not edit it. Kernels are timed by CUDA-graph replays over inputs larger than the L2 cache; each time is a
median, beside the baseline of the same run. The floor is what the card's bandwidth or its tensor cores allow. Ratios
above their aim are work to be done; [the last section](#what-misses-its-aim) says what is known of them. Measured
before kernels got their present form: the trainer; `isojax_llm`; attention's decode rows, launched with the kernel for
several tokens that decode steps no longer have, those of `attention_h200` and `attention_page16_h200` also before pages
were fetched by four warps; matmuls of two and eight leaves up to 64 tokens, which had no tiles of fewer weight rows;
norms and elementwise, which the compiler could still fuse; and the decode step by kernels.
"""


_ENGINE = """
Ratios of medians in one run; vLLM 0.26, pages of 16 positions. `isojax` is a rollout, `VllmEngine.generate`, which
hands out every token with its log-probability; `isojax_llm` is the same engine asked for them through `vllm.LLM`, as
stock vLLM is. Where seconds are far above device time, the engine waits for the host: of 256 requests stock vLLM ranks
and wraps every token's value at every step, a rollout keeps them on the device (`bridge/sampled_log.py`). vLLM's
batch-invariant mode and `isojax_llm` were measured beside stock vLLM in runs of their own. On 8B shapes seconds of two
runs lie 1% apart, of stock vLLM's 256 requests 16% (7.6 and 9.0 s, ours 7.2). On 1.7B shapes, where the host sets the
pace, up to 5%, with 32 requests 19%, with 256 up to 39%.
""".strip()


_TRAINING = """
Qwen3-1.7B shapes, 32 sequences of 512 tokens, layers computed again in the backward; the native arms are plain XLA.
The two beside the trainer's own are the same policy written for XLA alone, its head in one piece or in chunks: measured
once, no faster where there are gradients, and no longer in the benchmark.
""".strip()


_MISSES = """
## What misses its aim

- **256 requests on Qwen3-8B's shapes, device time: 1.03.** The card is at its power limit: while ours decode it draws
  692 W at 1635 of 1980 MHz, capped in all 43 samples; while stock vLLM's do, 671 W at 1830 MHz, capped in 41 of 44
  (`engine_power_qwen3_8b_h200.json`), with more pauses: it takes 16.3 ms a step, prompts included, of which a step on
  the card is 11.2, ours 14.1 and 11.6. Alone a layer takes 272 us (the table above), 9.8 ms for 36. Tried: gate, up and
  SwiGLU in one kernel, tiles of 128 rows, decode steps without attention's first kernel, pages fetched by four warps,
  all kept; weights fetched into L2 ahead, without gain. Probably what is left is energy: decode attention has 4 query
  heads a key head, and the tensor cores multiply 64 rows for them. In seconds a rollout takes 0.87 of stock vLLM's.
- **8 prompts of 8192 tokens on 8B shapes, seconds: 1.053** (1.05; on 1.7B shapes 1.04), while a decode step is faster:
  prefill pays, at the power limit in both arms. Attention over pages of 16 takes 1.09 to 1.23 of FlashAttention 3's
  time there (packed 0.97 to 1.19), products of four leaves up to 1.06 of cuBLAS's at 2048 tokens.
- **One request on 1.7B shapes, seconds: 1.09**, device time 0.79. Of 1.37 s for 512 tokens, 2.7 ms a step, the card
  works 1.4 ms; stock vLLM takes 1.26 s. In an earlier run, with other kernels and on another machine, the same rollout
  took 1.05 s and stock vLLM 1.58 s. The cause is not known.
- **Prefill attention, 1 x 8192: 1.19** (1.15). Three changes brought it from 1016 to 941 us: the next head's queries
  and keys come while one is computed, a split joins the earlier ones under the next one's scores, a mask costs two
  instructions. What sets the pace is the chain of one warpgroup (scores, softmax, weights), not the tensor cores; the
  overlap that FlashAttention 3 has would need the registers that the declared order of the splits takes. 16 x 1024 and
  2 x 1024 are within the aim.
- **Matmul of several leaves with many columns** (24576 x 4096): 1.06 to 1.23 from 256 tokens on. Every leaf's sum waits
  in registers or shared memory until it is added, which leaves room for narrower tiles only. Leaves in runs of two or
  four, sums in shared memory, two warpgroups a tile and clusters were tried; the committed tile is the fastest. Of a
  Qwen3 layer only the last products of attention and feed-forward have leaves.
- **Matmul up to 64 tokens**: with one and four leaves within the aim, but for the head of 64 rows, 1.01, where two
  warpgroups a tile measured 0.98 and are not committed yet, and 24576 columns in four leaves, 1.01. Two and eight
  leaves, which no shipped policy has, were not measured with today's tiles. **The head of 128 and 256 rows**: 1.06
  (1.05); tiles of 64 to 256 columns and of 128 rows were tried. **4096 x 12288 in one leaf, 128 tokens**: 1.23, with
  the four that are shipped 0.91.
""".strip()


_LAYER = """
Qwen3-8B shapes, in one CUDA graph: all of them with launches chained and not, then each kernel alone, over and over.
""".strip()


def _matmul() -> str:
    best: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, (first, end) in MATMUL_FILES.items():
        for row in _load(name)["rows"]:
            # Of a file with all tiles those that are not committed are left out where it says which.
            if not first <= row["T"] < end or not row.get("chosen", True):
                continue
            key = (row["N"], row["K"], row["T"], row["leaves"])
            if key not in best or row["ratio"] < best[key]["ratio"]:
                best[key] = {**row, "file": name.removesuffix(".json")}
    lines = []
    for (columns, inner, tokens, leaves), row in sorted(best.items()):
        aim = 1.0 if tokens <= FEW_TOKENS else MIDDLE_AIM if tokens <= MIDDLE_TOKENS else LARGE_AIMS[leaves]
        measured = (f"{row[name]:.1f}" for name in ("us", "cublas_us", "floor_us"))
        lines.append((columns, inner, tokens, leaves, *measured, f"{row['ratio']:.2f}", f"{aim:.2f}", row["file"]))
    titles = ("N", "K", "tokens", "leaves", "us", "cuBLAS us", "floor us", "ratio", "aim", "file")
    return f"## Matmul\n\nThe committed tile, weights [N, K], bfloat16.\n\n{_table(titles, lines)}"


def _attention() -> str:
    lines, seen = [], set()
    rows = [(name.removesuffix(".json"), row) for name in ATTENTION_FILES for row in _load(name)["rows"]]
    for file, row in rows:
        if (what := (row["what"], row.get("behind"))) in seen:
            continue
        seen.add(what)
        rate = f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['tb_per_s']:.2f} TB/s"
        aim = PREFILL_AIM if row["what"].startswith("prefill") else DECODE_AIM
        times = (f"{row[name]:.0f}" for name in ("us", "flash_attention_3_us"))
        behind = f" after {row['behind']}" if row.get("behind") else ""
        page = f", pages of {row['page']}" if "page" in row else ""
        ratio = (f"{row['ratio']:.2f}", f"{aim:.2f}")
        lines.append((row["what"] + behind + page, *times, *ratio, rate, file))
    titles = ("sequences x tokens", "us", "vLLM's FlashAttention 3 us", "ratio", "aim", "rate", "file")
    return f"## Attention\n\n32 query heads over 8 of size 128, bfloat16.\n\n{_table(titles, lines)}"


def _engine() -> str:
    lines = []
    for name, arms in ENGINE_FILES.items():
        found = _load(name)
        for arm in arms:
            ratios = found["ratios_to_stock"][arm]
            rows = {f"{row['batch']}x{row['prompt']}x{row['output']}": row for row in found["arms"][arm]["rows"]}
            for workload, ratio in ratios.items():
                row = rows[workload]
                device = (f"{row['device_ms_a_step']:.2f}", f"{ratio['device_ms_a_step']:.2f}")
                seconds = (f"{row['tokens_per_second']:.0f}", f"{ratio['seconds']:.2f}")
                aim = f"{ENGINE_AIMS.get(workload, 1.0):.2f}" if arm != "batch_invariant" else ""
                lines.append((found["policy"], arm, workload, *device, *seconds, aim))
    titles = (
        "shapes",
        "arm",
        "requests x in x out",
        "device ms a step",
        "ratio",
        "tokens/s",
        "ratio of seconds",
        "aim",
    )
    return f"## vLLM against stock vLLM\n\n{_ENGINE}\n\n{_table(titles, lines)}"


def _training() -> str:
    lines = [
        (row["what"], row["arm"], f"{row['ms']:.0f}", f"{row['working_gib']:.1f}", *_over(row))
        for row in _load("train_step_qwen3_1b7_h200.json")["rows"]
        if "ms" in row
    ]
    table = _table(("what", "arm", "ms", "GiB of work", "exact over this", "aim"), lines)
    return f"## The trainer\n\n{_TRAINING}\n\n{table}"


def _over(row: dict[str, Any]) -> tuple[str, str]:
    return (f"{row['exact_over_this']:.2f}", f"{TRAINING_AIM:.2f}") if "exact_over_this" in row else ("", "")


def _layer() -> str:
    rows = _load("layer_h200.json")["rows"]
    table = _table(
        ("what", "requests", "context", "us"),
        [(row["what"], row["T"], row["length"], f"{row['us']:.1f}") for row in rows],
    )
    return f"## The kernels of a decode layer\n\n{_LAYER}\n\n{table}"


def _launches() -> str:
    rows = _load("launch_cost_h200.json")["rows"]
    lines = [(row["what"], f"{row['host_us']:.1f}") for row in rows]
    return f"## Host time of a launch outside of a CUDA graph\n\n{_table(('call', 'us'), lines)}"


def _rows() -> str:
    copy, *rows = _load("rows_h200.json")["rows"]
    largest = max(row["T"] for row in rows)
    lines = [
        (row["what"], f"{row['us']:.1f}", f"{row['of_copy']:.2f}", f"{COPY_AIM}") for row in rows if row["T"] == largest
    ]
    title = f"## Norms and elementwise\n\n{largest} rows, against a copy's {copy['tb_per_s']:.2f} TB/s."
    return f"{title}\n\n{_table(('kernel', 'us', 'of copy', 'aim'), lines)}"


def _step() -> str:
    found = _load("step_kernels_qwen3_8b_h200.json")
    rows = found["kernels"]
    lines = [(_short(row["kernel"]), f"{row['a_step']:.0f}", f"{row['us_a_step']:.0f}") for row in rows[:STEP_ROWS]]
    rest = sum(row["us_a_step"] for row in rows[STEP_ROWS:])
    lines.append((f"{len(rows) - STEP_ROWS} others", "", f"{rest:.0f}"))
    between = ", ".join(found["between_regions"]) or "nothing"
    what = (
        f"Qwen3-8B shapes, {found['batch']} sequences of about 350 tokens, {found['device_us_a_step']:.0f} us on the "
        "device.\nLaunches are chained, so a kernel's time is what it adds after all that started before it"
    )
    table = _table(("kernel", "launches", "us"), lines)
    return f"## A decode step in vLLM\n\n{what}.\nBetween the regions of a layer: {between}.\n\n{table}"


def _short(kernel: str) -> str:
    """A name of ours as it is, and of a C++ template what it is called."""
    name = kernel.removesuffix("_mosaic_gpu_kernel")
    return name.split("<")[0].removeprefix("void ").strip() if "<" in name else name


def _load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
