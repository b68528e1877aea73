"""Finds the first region, layer and row where two executions of one forward part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import BadConfig
from isojax.evidence.capture import RegionOutput

_FORMAT = "isojax region outputs 2"


@dataclass(frozen=True)
class Parting:
    """Where two executions first differ. Everything before it, in program order, is equal in every bit.

    index: of the region's call in program order. result: which of its results. row: the first differing one on axis 0.
    elements: how many of the result's elements differ, of `size`. left, right: the first differing values.
    largest: the call with the largest difference of all, and that difference; usually a later one, and not the cause.
    """

    index: int
    region: str
    layer: int | None
    result: int
    row: int
    elements: int
    size: int
    left: float
    right: float
    largest: str
    largest_difference: float

    def __str__(self) -> str:
        place = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        return (
            f"first difference: region {self.region}, {place}, row {self.row}, result {self.result} (call {self.index} "
            f"in program order): {self.left!r} against {self.right!r}; {self.elements} of {self.size} elements differ. "
            f"The largest difference, {self.largest_difference:.3e}, is at {self.largest}."
        )


def find_parting(left: Sequence[RegionOutput], right: Sequence[RegionOutput]) -> Parting | None:
    """Compare two executions call by call, as bit patterns; None if all bits agree.

    The first difference is the cause and later ones follow from it, however large they grow. Raises BadConfig if the
    two did not run the same regions in the same order and shapes: they are not executions of one forward.
    """
    _require_same_program(left, right)
    first: tuple[int, int, np.ndarray] | None = None
    largest, largest_at = 0.0, ""
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        for number, (a, b) in enumerate(zip(one.results, other.results, strict=True)):
            differs = _bits(a) != _bits(b)
            if not differs.any():
                continue
            first = first or (index, number, differs)
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
            # NaN is farther than any number.
            worst = float("inf") if np.isnan(distance).any() else float(distance.max())
            if worst > largest or not largest_at:
                largest, largest_at = worst, str(one)
    if first is None:
        return None
    index, number, differs = first
    place = tuple(int(axis[0]) for axis in np.nonzero(differs))
    return Parting(
        index=index,
        region=left[index].region,
        layer=left[index].layer,
        result=number,
        row=place[0] if place else 0,
        elements=int(differs.sum()),
        size=differs.size,
        left=float(left[index].results[number][place]),
        right=float(right[index].results[number][place]),
        largest=largest_at,
        largest_difference=largest,
    )


def save_outputs(path: Path, outputs: Sequence[RegionOutput], tokens: Sequence[int]) -> None:
    """Write an execution on `tokens` to an .npz file: the bits of every result; names, layers and dtypes in a table."""
    table: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for index, output in enumerate(outputs):
        table.append({"region": output.region, "layer": output.layer, "dtypes": [str(r.dtype) for r in output.results]})
        arrays.update({f"{index}.{number}": _bits(result) for number, result in enumerate(output.results)})
    header = json.dumps({"format": _FORMAT, "tokens": list(tokens), "calls": table}).encode()
    with path.open("wb") as file:
        np.savez(file, header=np.frombuffer(header, np.uint8), **arrays)


def load_outputs(path: Path, tokens: Sequence[int]) -> list[RegionOutput]:
    """Read what `save_outputs` wrote. Raises BadConfig for any other file, and for a run on other tokens."""
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(bytes(file["header"]))
            if header["format"] != _FORMAT:
                raise ValueError(f"its format is {header['format']!r}")
            saved = header["tokens"]
            outputs = [
                RegionOutput(
                    call["region"],
                    call["layer"],
                    tuple(file[f"{index}.{number}"].view(dtype) for number, dtype in enumerate(call["dtypes"])),
                )
                for index, call in enumerate(header["calls"])
            ]
    # Broad, since a damaged archive makes NumPy, zipfile and zlib raise whatever they trip over.
    except Exception as error:
        raise BadConfig(
            field=str(path),
            found="no region outputs",
            allowed="a file of `isojax bisect --save`",
            reason=f"{type(error).__name__}: {error}",
        ) from error
    if saved != list(tokens):
        raise BadConfig(
            field=f"{path}, tokens",
            found=str(saved)[:80],
            allowed=str(list(tokens))[:80],
            reason="Runs on different tokens part at once, which says nothing; give the saved run's with --tokens.",
        )
    return outputs


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"uint{8 * values.dtype.itemsize}")


def _require_same_program(left: Sequence[RegionOutput], right: Sequence[RegionOutput]) -> None:
    def signature(output: RegionOutput) -> str:
        return f"{output}: " + ", ".join(f"{result.dtype}{list(result.shape)}" for result in output.results)

    ours, theirs = [signature(output) for output in left], [signature(output) for output in right]
    if ours == theirs:
        return
    shared = min(len(ours), len(theirs))
    place = next((index for index in range(shared) if ours[index] != theirs[index]), shared)
    raise BadConfig(
        field=f"call {place} of the two executions",
        found=theirs[place] if place < len(theirs) else "nothing",
        allowed=ours[place] if place < len(ours) else "nothing",
        reason="The two did not run the same regions on the same shapes, so there is nothing to compare from here on.",
    )
