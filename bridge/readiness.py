"""When an engine may be called: awake, compared with the contract, and with the weights of its last sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.vllm_api import weight_version
from contracts.errors import HandshakeRefused, UnsupportedRequest, WeightDigestMismatch

if TYPE_CHECKING:
    from vllm import LLM


def require_awake(asleep: bool) -> None:
    """Raises UnsupportedRequest for an engine that sleeps."""
    if asleep:
        raise UnsupportedRequest(
            field="engine",
            found="asleep",
            allowed="awake: engine.wake_up() first",
            reason="Its memory on the card belongs to somebody else.",
        )


def require_sleep(level: int, *, prepared: bool) -> None:
    """Raises UnsupportedRequest for a level that vLLM lacks, or where sleep was not prepared at the start."""
    if not prepared or level not in (1, 2):
        raise UnsupportedRequest(
            field="sleep",
            found=f"level {level}, engine.settings.sleep_mode {str(prepared).lower()}",
            allowed="level 1 or 2 of an engine that was started with sleep_mode",
            reason="vLLM allocates memory that it can give back only where it was told so at the start.",
        )


def require_checked_weights(llm: LLM, *, reported: bool, digest: str | None) -> str:
    """The digest of the weights that vLLM samples from, None until a sync succeeded, once it is known to be theirs.

    Raises HandshakeRefused before the engine has reported what it runs, and WeightDigestMismatch without a successful
    sync or when vLLM holds the weights of another one.
    """
    if not reported:
        raise HandshakeRefused(
            field="handshake",
            found="none",
            allowed="contracts.handshake(contract, engine.report()) before the first request",
            reason="Nobody has checked that this engine runs the trainer's contract.",
        )
    if digest is None:
        raise WeightDigestMismatch(
            field="weights",
            found="no successful sync",
            allowed="engine.sync(params) first",
            reason="Whose weights these are has not been checked.",
        )
    version = weight_version(llm)
    if version is not None and version != digest:
        raise WeightDigestMismatch(
            field="weight version in vLLM",
            found=version,
            allowed=digest,
            reason="Somebody else has updated this engine's weights since the last sync.",
        )
    return digest
