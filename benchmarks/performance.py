"""Makes docs/performance.md from the result files: python benchmarks/performance.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import performance_texts as texts
from engine import PACED
from markdown_table import table as _table

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
#: A row of a later file stands only where no earlier one has it. The last one is the tuner's.
MATMUL_FILES = tuple(f"matmul_{name}_h200.json" for name in ("turns", "eight_leaves", "tiles"))
#: What a ratio to cuBLAS should be at most, by leaves, for many tokens; for few it is 1, else `MIDDLE_AIM`.
LARGE_AIMS = {1: 1.0, 2: 1.05, 4: 1.05, 8: 1.1}
FEW_TOKENS, MIDDLE_TOKENS, MIDDLE_AIM = 64, 512, 1.05
COPY_AIM = 0.85
PREFILL_AIM, DECODE_AIM = 1.15, 1.1
ATTENTION_FILES = ("attention_decode_h200.json", "attention_prefill_h200.json")
#: Each with the arms that are taken from it.
ENGINE_FILES = {
    "engine_qwen3_8b_h200.json": ("isojax", "isojax_paced"),
    "engine_qwen3_8b_batch_invariant_h200.json": ("batch_invariant",),
    "engine_qwen3_1b7_h200.json": ("isojax", "isojax_llm"),
    "engine_qwen3_1b7_batch_invariant_h200.json": ("batch_invariant",),
}
ENGINE_AIMS = {"8x8192x64": 1.05}
TRAINING_AIM = 1.05
#: What each is of, and its file.
TRAINING_FILES = {
    "qwen3_1b7": "train_step_qwen3_1b7_h200.json",
    "qwen3_8b, 12 layers": "train_step_qwen3_8b_h200.json",
}
STEP_FILES = {"qwen3_1b7": "grpo_step_qwen3_1b7_h200.json", "qwen3_8b, 16 layers": "grpo_step_qwen3_8b_h200.json"}
STEP_PARTS = ("step", "rollout", "check", "train", "sync")
STEP_ROWS = 12


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page's text. Raises KeyError and FileNotFoundError for result files of another layout, or missing."""
    parts = [
        "# Performance",
        texts.INTRODUCTION,
        _engine(),
        _training(),
        _whole_steps(),
        _matmul(),
        _attention(),
        _energy(),
        _rows(),
        _layer(),
        _step(),
        _launches(),
        texts.MISSES,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _matmul() -> str:
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for name in MATMUL_FILES:
        for row in _load(name)["rows"]:
            if row["chosen"]:
                key = (row["N"], row["K"], row["T"], row["leaves"])
                rows.setdefault(key, {**row, "file": name.removesuffix("_h200.json")})
    lines = []
    for (columns, inner, tokens, leaves), row in sorted(rows.items()):
        aim = 1.0 if tokens <= FEW_TOKENS else MIDDLE_AIM if tokens <= MIDDLE_TOKENS else LARGE_AIMS[leaves]
        measured = (f"{row[name]:.1f}" for name in ("us", "cublas_us", "floor_us"))
        lines.append((columns, inner, tokens, leaves, *measured, f"{row['ratio']:.2f}", f"{aim:.2f}", row["file"]))
    titles = ("N", "K", "tokens", "leaves", "us", "cuBLAS us", "floor us", "ratio", "aim", "file")
    return f"## Matmul\n\n{texts.MATMUL.strip()}\n\n{_table(titles, lines)}"


def _attention() -> str:
    lines = []
    for row in (row for name in ATTENTION_FILES for row in _load(name)["rows"]):
        rate = f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['tb_per_s']:.2f} TB/s"
        aim = PREFILL_AIM if row["what"].startswith("prefill") else DECODE_AIM
        times = (f"{row[name]:.0f}" for name in ("us", "flash_attention_3_us"))
        behind = f" after {row['behind']}" if row.get("behind") else ""
        page = f", pages of {row['page']}" if "page" in row else ""
        lines.append((row["what"] + behind + page, *times, f"{row['ratio']:.2f}", f"{aim:.2f}", rate))
    titles = ("sequences x tokens", "us", "vLLM's FlashAttention 3 us", "ratio", "aim", "rate")
    return f"## Attention\n\n{texts.ATTENTION.strip()}\n\n{_table(titles, lines)}"


def _energy() -> str:
    lines = []
    for row in _load("energy_h200.json")["rows"]:
        us, mj = (f"{row[name]:.1f} ({row[spread]:.1f})" for name, spread in (("us", "spread_us"), ("mj", "spread_mj")))
        lines.append((row["model"], f"{row['requests']} x {row['length']}", row["arm"], us, mj, f"{row['watts']:.0f}"))
    table = _table(("shapes", "sequences x tokens", "arm", "us", "mJ", "W"), lines)
    return f"## Decode attention at the power limit\n\n{texts.ENERGY.strip()}\n\n{table}"


def _engine() -> str:
    lines = []
    for name, arms in ENGINE_FILES.items():
        found = _load(name)
        stock = _by_workload(found, "stock")
        for arm in arms:
            for workload, row in _by_workload(found, arm).items():
                ratio = found["ratios_to_stock"][arm][workload]
                aim = f"{ENGINE_AIMS.get(workload, 1.0):.2f}" if arm != "batch_invariant" else ""
                device = (_spread(each, "device_ms_a_step", "device_ms_spread") for each in (row, stock[workload]))
                seconds = (_spread(each, "seconds", "seconds_spread") for each in (row, stock[workload]))
                # How long a run takes that was made to wait says nothing.
                taken = ("", "", "") if arm == PACED else (*seconds, f"{ratio['seconds']:.2f}")
                file = name.removesuffix("_h200.json")
                lines.append((arm, workload, *device, f"{ratio['device_ms_a_step']:.2f}", *taken, aim, file))
    titles = ("arm", "requests x in x out", "device ms a step", "stock's", "ratio", "seconds", "stock's", "ratio")
    return f"## vLLM against stock vLLM\n\n{texts.ENGINE.strip()}\n\n{_table((*titles, 'aim', 'file'), lines)}"


def _by_workload(found: dict[str, Any], arm: str) -> dict[str, dict[str, Any]]:
    """An arm's rows. Raises ValueError for one that ended before it had measured all."""
    if found["arms"][arm]["exit_code"]:
        raise ValueError(f"{arm} of {found['policy']} ended early")
    return {f"{row['batch']}x{row['prompt']}x{row['output']}": row for row in found["arms"][arm]["rows"]}


def _spread(row: dict[str, Any], name: str, spread: str) -> str:
    # One run has none.
    return f"{row[name]:.2f}" + (f" ({row[spread]:.2f})" if row.get("runs") != 1 else "")


def _training() -> str:
    lines = [
        (shapes, row["what"], row["arm"], *(f"{row[ms]:.0f}" for ms in ("ms", "spread_ms")), *_over(row))
        for shapes, name in TRAINING_FILES.items()
        for row in _load(name)["rows"]
        if "ms" in row
    ]
    table = _table(("shapes", "what", "arm", "ms", "spread", "exact over this", "aim"), lines)
    return f"## The trainer\n\n{texts.TRAINING.strip()}\n\n{table}"


def _whole_steps() -> str:
    lines = []
    for shapes, name in STEP_FILES.items():
        found = _load(name)
        for part in STEP_PARTS:
            medians = (found["arms"][arm]["medians"][f"seconds_{part}"] for arm in ("exact", "native"))
            spreads = (f"{each['median']:.2f} ({each['least']:.2f} to {each['most']:.2f})" for each in medians)
            ratio = f"{found['exact_over_native'][f'seconds_{part}']:.2f}"
            lines.append((shapes, part, *spreads, ratio, f"{TRAINING_AIM:.2f}" if part == "step" else ""))
        alone = (f"{found['arms'][arm]['sync_ms']['median'] / 1000:.3f}" for arm in ("exact", "native"))
        lines.append((shapes, "sync alone", *alone, f"{found['exact_over_native']['sync_ms']:.2f}", ""))
    table = _table(("shapes", "part", "exact, s", "native, s", "ratio", "aim"), lines)
    return f"## A whole GRPO step\n\n{texts.WHOLE_STEPS.strip()}\n\n{table}"


def _over(row: dict[str, Any]) -> tuple[str, str]:
    return (f"{row['exact_over_this']:.2f}", f"{TRAINING_AIM:.2f}") if "exact_over_this" in row else ("", "")


def _layer() -> str:
    rows = _load("layer_h200.json")["rows"]
    table = _table(
        ("what", "requests", "context", "us"),
        [(row["what"], row["T"], row["length"], f"{row['us']:.1f}") for row in rows],
    )
    return f"## The kernels of a decode layer\n\n{texts.LAYER.strip()}\n\n{table}"


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
        "device.\nLaunches are chained, so a kernel's time is what it adds after all that started before it; kernels\n"
        "that prompts launch, too, have the scatter of those in it"
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
