"""Where a run keeps its files, and which folder a run of a given name gets."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import BadConfig
from contracts.user_files import read_json_object
from isojax.rl.config import Config
from isojax.rl.config_file import parse_config
from isojax.rl.files import write_atomically

# What may change when a run is resumed: how long it goes on and what it keeps, and nothing that decides a bit.
RESUMABLE = (
    *(("train", "steps"), ("train", "checkpoint_every"), ("train", "keep_checkpoints"), ("train", "compilation_cache")),
    *(("check", "on_mismatch"), ("metrics", "tensorboard"), ("engine", "memory", "reserve_bytes")),
)
# What may change too, and is said: on other devices the sums of later updates round otherwise.
MESH = (("train", "mesh", "dp"), ("train", "mesh", "fsdp"))


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME`: config.json, policy/ (what the run started from), checkpoints/, metrics.jsonl, report.html.

    And tensorboard/, where a run is asked for it.
    """

    path: Path

    @property
    def policy(self) -> Path:
        """The exported policy that the engine was started on; its weights are those before the first step."""
        return self.path / "policy"

    @property
    def checkpoints(self) -> Path:
        """The numbered training checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON line a step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def report(self) -> Path:
        """The curves, as one self-contained page."""
        return self.path / "report.html"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    def write_config(self, config: Config) -> None:
        """Keep the configuration beside the run."""
        write_atomically(self.config, json.dumps(config.model_dump(mode="json"), indent=2) + "\n")

    def require_same_config(self, config: Config) -> None:
        """Raise BadConfig, naming the first key, if the run was started with another setting that decides its bits.

        Another mesh is taken, and said on stderr: a checkpoint is restored onto it exactly.
        """
        found = read_json_object(self.config, refusal=BadConfig, allowed="a folder that isojax train wrote")
        # Parsed, so that a key which that version did not know yet has the value that it stood for.
        old = parse_config(found, source=str(self.config))
        differences = _differences(old.model_dump(mode="json"), config.model_dump(mode="json"), ())
        for key, before, now in differences:
            if key not in RESUMABLE + MESH:
                raise BadConfig(
                    field=".".join(key),
                    found=now,
                    allowed=before,
                    reason=f"{self.path} was started with it; a resumed run continues exactly. Keys that may change: "
                    + ", ".join(".".join(name) for name in RESUMABLE + MESH)
                    + ".",
                )
        for key, before, now in differences:
            if key in MESH:
                print(
                    f"isojax: {'.'.join(key)} was {before} and is {now}: weights and optimizer are the "
                    "checkpoint's, bit for bit; sums of later updates are rounded in another order than they would be",
                    file=sys.stderr,
                )


def new_run(root: Path, name: str) -> RunFolder:
    """A fresh folder for a run: `root/name`, or `root/name-2` and so on where runs of that name exist already."""
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return RunFolder(path)


def latest_run(root: Path, name: str) -> RunFolder:
    """The newest run of a name under `root`. Raises BadConfig if there is none."""
    number, found = 1, None
    while (path := root / (name if number == 1 else f"{name}-{number}")).exists():
        found, number = path, number + 1
    if found is None:
        raise BadConfig(
            field="--resume", found=f"no run {name!r} in {root}", allowed="a started run", reason="Nothing to resume."
        )
    return RunFolder(found)


def _differences(before: Any, now: Any, key: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [found for name in names for found in _differences(before.get(name), now.get(name), (*key, name))]
    return [] if before == now else [(key, before, now)]
