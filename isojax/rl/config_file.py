"""Reads a run's TOML file and turns every mistake in it into one readable refusal."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from contracts.errors import BadConfig, UnsupportedRequest
from contracts.user_files import read_text
from isojax.rl.algorithms import ALGORITHMS
from isojax.rl.config import Config

FILTERS = {
    "top_p": "top-p keeps part of the distribution and renormalises it",
    "top_k": "top-k keeps part of the distribution and renormalises it",
    "min_p": "min-p keeps part of the distribution and renormalises it",
    "repetition_penalty": "a penalty moves logits by the request's own history",
    "frequency_penalty": "a penalty moves logits by the request's own history",
    "presence_penalty": "a penalty moves logits by the request's own history",
    "logit_bias": "a bias moves logits outside of the policy",
    "min_tokens": "min_tokens masks the stop tokens",
}


def load_config(path: str | Path) -> Config:
    """The configuration in a TOML file.

    Raises BadConfig (missing file, not TOML, unknown key, wrong type, out of range), naming the file, the key, what is
    allowed and for an unknown key the nearest known one; UnsupportedRequest for a sampling filter.
    """
    path = Path(path)
    text = read_text(path, refusal=BadConfig, allowed="a readable TOML file", field="config")
    try:
        values = tomllib.loads(text)
    # ValueError also for a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        raise BadConfig(field="config", found=str(path), allowed="valid TOML", reason=str(error)) from None
    return parse_config(values, source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> Config:
    """The configuration in a nested mapping; `source` names it in refusals. Raises as `load_config` does."""
    _refuse_filters(values.get("rollout", {}), source)
    try:
        return Config.model_validate(_tuples(values))
    except ValidationError as error:
        raise _explained(error, source) from None


def _tuples(value: Any) -> Any:
    """TOML has lists alone; the frozen configuration holds tuples. Free-form `settings` and `random` keep lists."""
    if isinstance(value, dict):
        free = ("settings", "random")
        return {key: item if key in free else _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _refuse_filters(rollout: Any, source: str) -> None:
    if not isinstance(rollout, dict):
        return
    for key in sorted(FILTERS.keys() & rollout.keys()):
        raise UnsupportedRequest(
            field=f"rollout.{key} in {source}",
            found=rollout[key],
            allowed="sampling from the policy's whole distribution (temperature only)",
            reason=f"{FILTERS[key]}: the rollout's log-probabilities would no longer be the policy's "
            "log_softmax(logits / temperature), which the trainer differentiates; for a filter the bias is the "
            "logarithm of the kept mass. Remove the key.",
        )


def _explained(error: ValidationError, source: str) -> BadConfig:
    """The first of pydantic's complaints, in our own words."""
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        values = first["input"] if isinstance(first["input"], dict) else {"name": first["input"]}
        return BadConfig(
            field=f"algorithm.name in {source}",
            found=values["name"],
            allowed=list(ALGORITHMS),
            reason="The algorithm's other keys depend on it.",
        )
    # Behind a section of several kinds pydantic puts which kind it took.
    algorithm = location.pop(1) if location[:1] == ["algorithm"] and len(location) > 1 else None
    field = ".".join(location) or "the whole file"
    if first["type"] == "extra_forbidden":
        section = ALGORITHMS[algorithm] if algorithm else _section_at(location[:-1])
        allowed = sorted(section.model_fields)
        others = [name for name, other in ALGORITHMS.items() if algorithm and location[-1] in other.model_fields]
        near = difflib.get_close_matches(location[-1], allowed, n=1)
        reason = f"Unknown key. Did you mean {near[0]!r}?" if near else "Unknown key. Nothing known is spelled like it."
        if others:
            reason = f"{algorithm} does not use it; {' and '.join(others)} would."
        return BadConfig(field=f"{field} in {source}", found=location[-1], allowed=allowed, reason=reason)
    if first["type"] == "missing":
        return BadConfig(
            field=f"{field} in {source}", found="nothing", allowed="a value", reason="This key has no default."
        )
    found = repr(first["input"]) if not isinstance(first["input"], dict) else "the section's keys together"
    message = first["msg"].removeprefix("Value error, ")
    return BadConfig(field=f"{field} in {source}", found=found, allowed=message, reason="The value does not fit.")


def _section_at(location: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    return section
