"""Line charts as SVG, in a page or as files: no script, no font, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 30
_ABOVE, _BELOW = 24, 20
_LETTER = 6
_STYLE = """
svg { color-scheme: light dark; font-family: system-ui, sans-serif; }
.paper { fill: #ffffff; } .title { fill: #1b1f24; font-size: 14px; font-weight: 600; }
.grid { stroke: #e3e7ec; } .tick { fill: #5b6570; font-size: 11px; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1; opacity: 0.35; } line.faint { opacity: 0.35; }
.line-1 { stroke: #2563eb; } .line-2 { stroke: #d9480f; } .line-3 { stroke: #0f8a5f; } .line-4 { stroke: #8b5cf6; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1c2127; } .title { fill: #e8ebef; } .grid { stroke: #2d343c; } .tick { fill: #98a3af; }
  .line-1 { stroke: #6ea0ff; } .line-2 { stroke: #ff9a5c; } .line-3 { stroke: #4cc79a; } .line-4 { stroke: #b79bff; } }
"""


@dataclass(frozen=True)
class Line:
    """One curve. color: the N of its CSS class `line-N`. faint: drawn thin, as the raw data behind a smoothed one."""

    label: str
    values: Sequence[float]
    color: int = 1
    faint: bool = False


def chart(title: str, steps: Sequence[int], lines: Sequence[Line], *, unit: str = "", note: str = "") -> str:
    """An HTML figure of the lines over `steps`; the vertical axis includes 0 and a point shows its value on hover."""
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{_marks(steps, lines)}</svg>'
    legend = "".join(
        f'<span class="key"><i class="swatch swatch-{line.color}{" faint" if line.faint else ""}"></i>'
        f"{escape(line.label)}</span>"
        for line in lines
    )
    heading = f"{escape(title)}{f' <small>{escape(unit)}</small>' if unit else ''}"
    caption = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<figure><figcaption>{heading}</figcaption>{svg}<div class="legend">{legend}</div>{caption}</figure>'


def picture(title: str, steps: Sequence[int], lines: Sequence[Line], *, unit: str = "") -> str:
    """The same chart as an SVG file of its own: colors, title and legend are inside of it, and no point reacts."""
    legend, left = [], LEFT
    for line in lines:
        faint = " faint" if line.faint else ""
        legend.append(
            f'<line class="line-{line.color}{faint}" stroke-width="2" x1="{left}" x2="{left + 14}" y1="-4" y2="-4"/>'
            f'<text class="tick" x="{left + 20}" y="0">{escape(line.label)}</text>'
        )
        left += 36 + _LETTER * len(line.label)
    heading = f"{escape(title)}{f', {escape(unit)}' if unit else ''}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + _ABOVE + _BELOW}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{_STYLE}</style>\n<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{LEFT}" y="20">{heading}</text>\n'
        f'<g transform="translate(0 {_ABOVE})">{_marks(steps, lines, hover=False)}</g>\n'
        f'<g transform="translate(0 {HEIGHT + _ABOVE + 10})">{"".join(legend)}</g>\n</svg>\n'
    )


def _marks(steps: Sequence[int], lines: Sequence[Line], *, hover: bool = True) -> str:
    """Grid, numbers and curves, in a space of WIDTH by HEIGHT."""
    values = [value for line in lines for value in line.values if math.isfinite(value)]
    low, high, marks = _axis(min([0.0, *values]), max([0.0, *values]))
    first, last = (steps[0], steps[-1]) if steps else (0, 1)

    def x(step: float) -> float:
        span = max(last - first, 1)
        return LEFT + (step - first) / span * (WIDTH - LEFT - RIGHT) if last > first else (LEFT + WIDTH - RIGHT) / 2

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for mark in marks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{_number(mark)}</text>'
        )
    for step in sorted({first, (first + last) // 2, last}):
        parts.append(
            f'<text class="tick" x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>'
        )
    for line in lines:
        points = [(x(step), y(value), step, value) for step, value in zip(steps, line.values, strict=True)]
        parts.append(_curve(line, points, hover=hover))
    return "".join(parts)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _curve(line: Line, points: Sequence[tuple[float, float, int, float]], *, hover: bool) -> str:
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, value in points if math.isfinite(value))
    style = f"line-{line.color}{' faint' if line.faint else ''}"
    dots = ""
    if hover and not line.faint:
        # Large enough to point at, drawn only where few enough to tell apart.
        radius = 3 if len(points) <= 40 else 0
        dots = "".join(
            f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}"/><circle class="hover" cx="{px:.1f}" '
            f'cy="{py:.1f}" r="6"><title>{escape(line.label)}, step {step}: {_number(value)}</title></circle>'
            for px, py, step, value in points
            if math.isfinite(value)
        )
    return f'<polyline class="{style}" points="{path}"/>{dots}'


def _axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Round limits around the data and the marks between them."""
    if high <= low:
        high = low + 1.0
    rough = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    bottom, top = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((top - bottom) / step)
    return bottom, top, [bottom + step * number for number in range(count + 1)]


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.4g}"
