"""A run's page: what it learned, whether every bit agreed, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from isojax.rl.charts import Line, chart, smoothed
from isojax.rl.files import write_atomically
from isojax.rl.metrics import read_metrics
from isojax.rl.run_folder import RunFolder

_TABLE_ROWS = 50
_COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward_mean", ".3f"),
    ("tokens", "tokens", "d"),
    ("mismatches", "mismatch_tokens", "d"),
    ("full rows", "full_rows", "d"),
    ("row mismatches", "full_row_mismatches", "d"),
    ("clip fraction", "clip_fraction", ".4f"),
    ("rollout tokens/s", "tokens_per_second_rollout", ".0f"),
    ("train tokens/s", "tokens_per_second_train", ".0f"),
    ("gradient norm", "gradient_norm", ".3f"),
    ("rollout s", "seconds_rollout", ".2f"),
    ("check s", "seconds_check", ".2f"),
    ("train s", "seconds_train", ".2f"),
    ("sync s", "seconds_sync", ".2f"),
    ("weights", "weight_digest", "s"),
)


def write_report(folder: RunFolder) -> None:
    """Write `report.html` from the run's metrics: one self-contained page, replaced as a whole."""
    lines = read_metrics(folder.metrics)
    config = folder.config.read_text(encoding="utf-8") if folder.config.exists() else ""
    write_atomically(folder.report, render(folder.path.name, lines, config))


def render(name: str, lines: Sequence[dict[str, Any]], config: str = "") -> str:
    """The page of a run from its metrics lines (see `isojax.rl.metrics.StepMetrics`) and its configuration's text."""
    template = Template(files("isojax.rl").joinpath("report_template.html").read_text(encoding="utf-8"))
    wrong = sum(line["mismatch_tokens"] + line["full_row_mismatches"] for line in lines)
    return template.substitute(
        title=escape(f"isojax run {name}{' (native arm: no contract)' if _native(lines) else ''}"),
        subtitle=_subtitle(lines),
        verdict=_verdict(lines),
        verdict_class=" bad" if wrong or _native(lines) else "",
        tiles="".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
            for value, what in _tiles(lines)
        ),
        charts="".join(_charts(lines)),
        table=_table(lines),
        config=escape(config),
    )


def run_summary(folder: RunFolder) -> str:
    """The run in three lines for a terminal, or that it has no metrics (somebody removed them)."""
    lines = read_metrics(folder.metrics)
    if not lines:
        return f"{folder.metrics} holds no step\nreport: {folder.report}"
    native = "native arm: stock stacks, nothing is promised of their bits\n" if _native(lines) else ""
    return (
        f"{native}reward {lines[0]['reward_mean']:.3f} in the first step, {lines[-1]['reward_mean']:.3f} in the last\n"
        f"{_total(lines, 'mismatch_tokens')} of {_total(lines, 'tokens')} sampled tokens and "
        f"{_total(lines, 'full_row_mismatches')} of {_total(lines, 'full_rows')} full rows differ\n"
        f"report: {folder.report}"
    )


def _native(lines: Sequence[dict[str, Any]]) -> bool:
    return any(line["arm"] == "native" for line in lines)


def _subtitle(lines: Sequence[dict[str, Any]]) -> str:
    if not lines:
        return "no step finished yet"
    if _native(lines):
        return "native arm: a plain XLA forward beside a stock engine, under no contract"
    return escape(f"numerical policy {lines[-1]['numerical_policy'][:16]}…")


def _total(lines: Sequence[dict[str, Any]], key: str) -> int:
    return sum(line[key] for line in lines)


def _verdict(lines: Sequence[dict[str, Any]]) -> str:
    if not lines:
        return "Nothing was compared yet."
    tokens, rows = _total(lines, "tokens"), _total(lines, "full_rows")
    wrong, wrong_rows = _total(lines, "mismatch_tokens"), _total(lines, "full_row_mismatches")
    if _native(lines):
        return (
            f"<b>Native arm.</b> No contract is claimed. {wrong:,} of {tokens:,} sampled tokens differ between the "
            f"stock engine and the plain forward, by at most {max(line['mismatch_max_abs'] for line in lines):.3e}."
        )
    if not wrong and not wrong_rows:
        return (
            f"<b>Equal bits.</b> 0 of {tokens:,} sampled tokens and 0 of {rows:,} full log-probability rows differ "
            "between the engine that sampled them and the trainer that learned from them."
        )
    worst = max(line["mismatch_max_abs"] for line in lines)
    return (
        f"<b>Different bits.</b> {wrong:,} of {tokens:,} sampled tokens and {wrong_rows:,} of {rows:,} full rows "
        f"differ, by at most {worst:.3e}."
    )


def _tiles(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    if not lines:
        return []
    part = max(1, min(20, len(lines) // 2))
    before = sum(line["reward_mean"] for line in lines[:part]) / part
    after = sum(line["reward_mean"] for line in lines[-part:]) / part
    seconds = [sum(value for key, value in line.items() if key.startswith("seconds_")) for line in lines]
    steps = "step" if part == 1 else f"{part} steps"
    return [
        (f"{lines[-1]['step']:,}", "steps"),
        (f"{before:.3f} → {after:.3f}", f"mean reward, first and last {steps}"),
        (f"{_total(lines, 'tokens'):,}", "sampled tokens compared"),
        (f"{_total(lines, 'full_rows'):,}", "full rows compared"),
        (f"{sorted(seconds)[len(seconds) // 2]:.2f} s", "median step"),
        (f"{sum(seconds) / 60:.1f} min", "in all"),
    ]


def _charts(lines: Sequence[dict[str, Any]]) -> list[str]:
    steps = [line["step"] for line in lines]

    def values(key: str) -> list[float]:
        return [float("nan") if line[key] is None else float(line[key]) for line in lines]

    reward = values("reward_mean")
    curves = [Line("mean reward", reward)]
    if len(reward) > 20:
        curves = [Line("a step", reward, faint=True), Line("mean of the last 10 steps", smoothed(reward, 10))]
    divergence = [
        Line("rollout policy against updated policy, k3", values("policy_kl")),
        Line("k1", values("policy_kl_k1"), 3),
    ]
    if any(line["kl"] is not None for line in lines):
        divergence.append(Line("policy against frozen reference, k3", values("kl"), 2))
        divergence.append(Line("k1", values("kl_k1"), 4))
    entropy = [Line("estimate, all sampled tokens", values("entropy_sampled"))]
    if any(line["entropy"] is not None for line in lines):
        entropy.append(Line("exact, full rows", values("entropy"), 2))
    if any(line["entropy_train"] is not None for line in lines):
        entropy.append(Line("exact, all tokens of the updates", values("entropy_train"), 4))
    return [
        chart("Reward", steps, curves),
        chart(
            "Mismatches",
            steps,
            [Line("sampled tokens", values("mismatch_tokens")), Line("full rows", values("full_row_mismatches"), 2)],
            unit="a step",
            note="Counted as bit patterns: one bit of difference is a mismatch.",
        ),
        _seconds_chart(lines),
        chart("KL", steps, divergence, unit="nats a token", note="Estimates at the sampled tokens."),
        chart("Entropy", steps, entropy, unit="nats a token"),
        chart(
            "Clip fraction",
            steps,
            [Line("all updates", values("clip_fraction")), Line("first minibatch", values("first_clip_fraction"), 2)],
        ),
        chart("Gradient norm", steps, [Line("before clipping", values("gradient_norm"))]),
    ]


def _seconds_chart(lines: Sequence[dict[str, Any]]) -> str:
    """Seconds of each part. The first step compiles everything, and would flatten all others."""
    drawn, note = (lines[1:], "Not drawn: step 1, which compiles") if len(lines) > 3 else (lines, "")
    if note:
        note += f", with {sum(value for key, value in lines[0].items() if key.startswith('seconds_')):.0f} s."
    parts = ("rollout", "check", "train", "sync")
    curves = [Line(part, [line[f"seconds_{part}"] for line in drawn], n) for n, part in enumerate(parts, 1)]
    return chart("Seconds", [line["step"] for line in drawn], curves, unit="a step", note=note)


def _table(lines: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name, _, _ in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(format(line[key], form))}</td>" for _, key, form in _COLUMNS) + "</tr>"
        for line in lines[-_TABLE_ROWS:]
    )
    return f"<tr>{head}</tr>{rows}"
