"""Writes the table of measured tiles: python benchmarks/matmul_table.py RESULT.json ... > hopper_table.py.

An entry stands only where the best tile is faster than the one that the estimate chooses, by more than a hundredth.
"""

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pallas_kernels.matmul import hopper_table
from pallas_kernels.matmul.hopper_choice import SMALL_TOKENS, Tile, choose_tile
from pallas_kernels.matmul.hopper_cluster import ClusterTile
from pallas_kernels.matmul.hopper_large import LargeTile
from pallas_kernels.matmul.hopper_small import SmallTile

GAIN = 0.99


def main() -> None:
    """Prints the module."""
    shapes: dict[tuple[int, int, int], dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in sys.argv[1:]:
        for row in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]:
            if row["T"] > SMALL_TOKENS and row["bits_as_the_first_tile"]:
                shapes[row["N"], row["K"], row["leaves"]][row["T"]].append(row)
    hopper_table.MEASURED.clear()
    source = Path(hopper_table.__file__).read_text(encoding="utf-8")
    print(source[: source.index("MEASURED:")] + _ANNOTATION + " = {")
    for (N, K, leaves), by_tokens in sorted(shapes.items()):
        entries = {T: found for T, rows in sorted(by_tokens.items()) if (found := _better(rows, T, N, K, leaves))}
        if entries:
            print(f"    ({N}, {K}, {leaves}): {{")
            for T, tile in entries.items():
                print(f"        {T}: {tile},")
            print("    },")
    print("}")


_ANNOTATION = "MEASURED: dict[tuple[int, int, int], dict[int, ClusterTile | LargeTile | SmallTile]]"


def read_tile(text: str) -> Tile:
    """The tile that a result file names by its repr; fields that came later have their defaults."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    forms = {form.__name__: form for form in (ClusterTile, LargeTile, SmallTile)}
    fields = {str(field.arg): ast.literal_eval(field.value) for field in call.keywords}
    return forms[call.func.id](**fields)


def _better(rows: list[dict[str, Any]], T: int, N: int, K: int, leaves: int) -> str | None:
    best = min(rows, key=lambda row: row["us"])
    chosen = choose_tile(T, N, K, leaves)
    known = [row["us"] for row in rows if read_tile(row["tile"]) == chosen]
    if read_tile(best["tile"]) == chosen or (known and best["us"] > GAIN * known[0]):
        return None
    return str(best["tile"])


if __name__ == "__main__":
    main()
