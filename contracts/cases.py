"""The four ways in which a log-probability comes about. There is no fifth."""

from typing import Literal, cast

from contracts.errors import UnknownCase

Case = Literal["trainer_fwd", "trainer_score", "engine_prefill", "engine_decode"]
CASES: tuple[Case, ...] = ("trainer_fwd", "trainer_score", "engine_prefill", "engine_decode")


def check_case(name: str) -> Case:
    """The case itself. Raises `UnknownCase` for a log-probability path that the contract does not know."""
    if name in CASES:
        return cast(Case, name)
    raise UnknownCase(
        field="case",
        found=repr(name),
        allowed=", ".join(CASES),
        reason="A log-probability path that no gate compares with the others may give other bits.",
    )
