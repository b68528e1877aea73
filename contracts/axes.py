"""The axes of a mesh, and meshes as a user writes them."""

import re
from typing import Literal, get_args

from contracts.errors import BadConfig

Axis = Literal["dp", "fsdp", "pp", "tp", "ep", "sp", "cp"]
AXES: tuple[Axis, ...] = get_args(Axis)


def parse_mesh(text: str) -> dict[str, int]:
    """`"tp=4,ep=8"` to `{"tp": 4, "ep": 8}`; axes that are not named have degree 1. Empty text is one device.

    Raises `BadConfig` for an unknown axis, an axis named twice, or a degree that is not a positive integer of at most 9
    digits.
    """
    mesh: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"([a-z]+)\s*=\s*([1-9][0-9]{0,8})", part)
        if match is None or match[1] not in AXES or match[1] in mesh:
            raise BadConfig(
                field="mesh",
                found=repr(part)[:80],
                allowed=f"axis=degree, comma-separated, each of {', '.join(AXES)} at most once, degree 1 to 999999999",
                reason="A mesh that is misread would be checked against the wrong claim.",
            )
        mesh[match[1]] = int(match[2])
    return mesh
