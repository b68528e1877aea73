"""The rollout protocol: what a trainer asks of an engine, in tokens, and what it gets back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from contracts import check_temperature, token_ids
from contracts.errors import BadConfig, UnsupportedRequest

if TYPE_CHECKING:
    from pathlib import Path

    from contracts import EngineReport, ExecutionContract
    from isojax.policy.policy import Arm

ENGINE_ENTRY_POINTS = "isojax.engines"


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn: from the policy's own distribution log_softmax(logits / temperature), unfiltered.

    There is no top-k, top-p or min-p here: they renormalise the rollout's probabilities by the kept mass and leave the
    trainer's alone, so both sides would hold different values for the same token.

    `seed` None draws fresh seeds for every request. With a seed, sample `j` of prompt `i` uses
    `request_seed(seed, i, j)`, so that one call's samples are distinct and two equal calls are equal.
    """

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    seed: int | None = None
    samples: int = 1
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no engine can draw."""
        _require_count("max_tokens", self.max_tokens, 1, "A completion has a token.")
        _require_count("samples", self.samples, 1, "Each prompt needs a completion.")
        if self.seed is not None:
            _require_count("seed", self.seed, 0, "Requests derive theirs from it.")
        check_temperature(self.temperature, refusal=UnsupportedRequest)
        token_ids(self.stop_token_ids, field="stop_token_ids", refusal=UnsupportedRequest)
        if self.greedy and self.samples > 1:
            raise UnsupportedRequest(
                field="samples", found=self.samples, allowed="1 when greedy", reason="Greedy samples are all the same."
            )


def _require_count(field: str, value: object, least: int, reason: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UnsupportedRequest(field=field, found=value, allowed=f"an integer, {least} or more", reason=reason)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation, in tokens. Text is never carried: detokenising and retokenising changes the history.

    log_probs: float32 [len(tokens)], the engine's log-probability of each token of `tokens` when it was sampled.
    finish_reason: "stop" (a stop token, which is the last of `tokens`) or "length".
    weight_digest: of the weights that the engine held, as `sync` returned it. They are those of every token, since an
    engine takes weights only while no request is in flight.
    policy_version: of the same weights, optimizer updates behind them; a trainer knows it, an engine leaves it None.
    rows: full log-probability rows, float32 [vocab_size], by index into `tokens`; None where none were asked for.
    """

    prompt_index: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    log_probs: np.ndarray
    finish_reason: str
    weight_digest: str
    rows: Mapping[int, np.ndarray] | None = None
    policy_version: int | None = None


@dataclass(frozen=True)
class TappedRows:
    """Full log-probability rows of one call, left on the device that computed them.

    rows: fp32 [capacity, vocab_size], as anything that exports its memory through DLPack; those at `slots` are set.
    completions, token_indices: of each of these, the index of its completion in the call's result, and of its token in
    that completion. chunk_ends: prefill chunks of the call that ended before their prompt did.
    """

    rows: Any
    slots: tuple[int, ...]
    completions: tuple[int, ...]
    token_indices: tuple[int, ...]
    chunk_ends: int


@runtime_checkable
class RolloutEngine(Protocol):
    """An engine that samples from the policy and reports the log-probability of what it sampled."""

    @property
    def contract(self) -> ExecutionContract:
        """The contract that the engine runs."""
        ...

    @property
    def runs_beside_trainer(self) -> bool:
        """Whether `generate` may run in another thread while this one trains: true of an engine in its own process."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, full_rows: int = 0) -> list[Completion]:
        """Sample `sampling.samples` completions of each prompt; grouped by prompt, in sample order.

        `full_rows`: about how many full log-probability rows to return over the whole call (see `Completion.rows`);
        fewer only where fewer tokens were sampled.
        Raises EmptyBatch, PromptTooLong, UnsupportedRequest, NonFiniteLogits, WeightDigestMismatch.
        """
        ...

    def sync(self, params: Mapping[str, Any]) -> str:
        """Take the trainer's packed parameters (flat names to arrays); return the digest of what the engine now holds.

        Raises WeightDigestMismatch if that is not the digest of `params`.
        """
        ...

    def report(self) -> EngineReport:
        """What the engine really runs, for the handshake."""
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds."""
        ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any parts, equal in every process (SHA-256; Python's own hash is salted)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def request_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one request of one `generate` call; distinct for each prompt and sample."""
    return derive_seed("request", seed, prompt_index, sample_index)


def open_engine(name: str, folder: str | Path, *, arm: Arm = "exact", **settings: Any) -> RolloutEngine:
    """Start the engine that is registered as `name` on an exported policy folder.

    arm: "native" starts its baseline instead, the class's own `native(folder, **settings)`, on an ordinary checkpoint.
    Raises as `engine_class`, and BadConfig for an engine without a baseline.
    """
    engine = engine_class(name)
    if arm == "exact":
        return engine(folder, **settings)
    if not hasattr(engine, "native"):
        raise BadConfig(
            field="policy.arm", found=arm, allowed="exact", reason=f"The engine {name!r} has no baseline to start."
        )
    return engine.native(folder, **settings)


def engine_class(name: str) -> Any:
    """What is registered as `name`: called with a folder and settings it starts an engine.

    It may also have `native`, see `open_engine`, and `device_bytes()`, the memory of the card that the engine would run
    on or None without a card. Engines are found through the entry point group `isojax.engines`, so the trainer never
    imports one. Raises BadConfig if no installed package registers the name.
    """
    found = {point.name: point for point in entry_points(group=ENGINE_ENTRY_POINTS)}
    if name not in found:
        raise BadConfig(
            field="engine.name",
            found=name,
            allowed=sorted(found) or "none is installed",
            reason=f"Engines register under the entry point group {ENGINE_ENTRY_POINTS!r}; install isojax with pip.",
        )
    return found[name].load()
