"""Real vLLM on a card refuses a damaged policy when it starts, by name, and accepts an equal copy of an intact one.

Needs exported policies, named by ISOJAX_CARD_POLICIES as in `test_engine_on_card`. ISOJAX_CARD_RESULTS=FILE writes what
was refused, and how, with the card, the versions, the date and the command.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from card_policies import FOLDERS, needs_policies

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks"), str(Path(__file__).parents[1])]

from bundle_damage import OTHER_PTXAS, damages, other_ptxas_on_both_sides, with_another_tile  # noqa: E402

SETTINGS = {"max_sequences": 8, "kv_cache_bytes": 1 << 28, "cuda_graphs": False}
DAMAGES = damages(with_another_tile)

pytestmark = needs_policies


def _engine(folder: Path) -> None:
    """isojax's own way to start it, with the handshake and a token."""
    from card_engine import running_engine

    from isojax import load
    from isojax.rl.rollout import Sampling

    with running_engine(folder, SETTINGS) as engine:
        _, params = load(folder)
        engine.sync(params)
        engine.generate([[5, 6, 7]], Sampling(max_tokens=1, seed=0))


def _vllm(folder: Path) -> None:
    """vLLM's LLM class with the plugin and nothing else of isojax."""
    from bridge.start import EngineOptions, start_vllm, stop_vllm
    from contracts import load_contract

    stop_vllm(start_vllm(folder, load_contract(folder), EngineOptions.of(SETTINGS)))


ROUTES: dict[str, Callable[[Path], None]] = {"VllmEngine": _engine, "vllm.LLM": _vllm}


@contextmanager
def _copy() -> Iterator[Path]:
    """A policy that this card may run, whose kernels are files of its own."""
    from card_engine import proved_copy

    from isojax.kernels import KERNELS_FOLDER

    with proved_copy(FOLDERS[0]) as folder:
        kernels = folder / KERNELS_FOLDER
        original = kernels.resolve()
        kernels.unlink()
        shutil.copytree(original, kernels)
        yield folder


@pytest.fixture(scope="module")
def record() -> Callable[[str, str, BaseException | None], None]:
    """Prints an outcome and writes all of them so far."""
    from card_engine import device_kind

    results: dict[str, Any] = {
        "card": device_kind(),
        "date": date.today().isoformat(),
        "command": shlex.join(sys.argv),
        "versions": {name: version(name) for name in ("jax", "torch", "vllm")},
        "policy": FOLDERS[0].name,
        "outcomes": [],
    }

    def record_outcome(name: str, route: str, error: BaseException | None) -> None:
        outcome = {"damage": name, "started_by": route, "refused_as": error and type(error).__name__}
        results["outcomes"].append({**outcome, "message": error and str(error)})
        print(json.dumps(results["outcomes"][-1]), flush=True)
        if path := os.environ.get("ISOJAX_CARD_RESULTS"):
            Path(path).write_text(json.dumps(results, indent=2) + "\n")

    return record_outcome


def _error_of(start: Callable[[Path], None], folder: Path) -> Exception | None:
    try:
        start(folder)
    except Exception as error:  # Whatever it is, it is recorded and then compared with what it should be.
        return error
    return None


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_policy_is_refused_at_the_start(record, name, route):
    with _copy() as folder:
        DAMAGES[name].apply(folder)
        error = _error_of(ROUTES[route], folder)
    record(name, route, error)
    with pytest.raises(DAMAGES[name].refusal, match=DAMAGES[name].says):
        raise error or AssertionError("it started")


def test_kernels_that_another_ptxas_was_proved_with_are_refused(record):
    from contracts.errors import Refusal

    name = "another ptxas in the manifest and the contract alike"
    with _copy() as folder:
        other_ptxas_on_both_sides(folder)
        error = _error_of(_engine, folder)
    record(name, "VllmEngine", error)
    with pytest.raises(Refusal, match=rf"(?s)ptxas.*{OTHER_PTXAS}|{OTHER_PTXAS}.*ptxas"):
        raise error or AssertionError("it started")


def test_an_equal_copy_is_accepted(record):
    with _copy() as folder:
        error = _error_of(_engine, folder)
    record("none: an equal copy", "VllmEngine", error)
    if error is not None:
        raise error
