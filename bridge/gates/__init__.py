"""The gates of sealed kernels on a card: `isojax verify --arch sm90`, found through the entry point `isojax.gates`."""

from __future__ import annotations

from pathlib import Path

from isojax.evidence.gates import GateSuite


def sm90_suite(folder: Path | None = None) -> GateSuite:
    """The gates over a policy's own kernels, or over those of a small policy that are sealed on the spot."""
    # Imported here: gates of a CPU are listed without torch.
    from bridge.gates.suite import make_suite

    return make_suite(folder)
