"""Tables of the pages that are made from result files."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
