"""The gates of sealed kernels on a card: `isojax verify --arch sm90`, found through the entry point `isojax.gates`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from isojax.evidence.gates import GateSuite


def sm90_suite(folder: Path | None = None, mesh: Mapping[str, int] = {}) -> GateSuite:
    """The gates over a policy's own kernels, or over those of a small policy that are sealed on the spot.

    mesh: degrees by axis that are to be proved on this machine's cards, too.
    """
    # Imported here: gates of a CPU are listed without torch.
    from bridge.gates.suite import make_suite

    return make_suite(folder, mesh)
