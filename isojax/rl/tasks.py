"""Prompts and rewards: a reasoning-gym data set, a JSONL file, or the user's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts import token_ids
from contracts.errors import BadConfig, EmptyBatch
from contracts.user_files import read_json_lines
from isojax.rl.config import TaskSection
from isojax.rl.functions import import_function, own_code

PROMPT_KEYS = ("prompt", "text", "messages", "tokens")


@dataclass(frozen=True)
class Example:
    """One prompt, given in exactly one form, and whatever its reward needs to know.

    prompt: a user's message, put through the policy's chat template. text: encoded as it stands.
    messages: a chat of {"role", "content"}. tokens: token ids.
    fields: the example's other values, such as "answer".
    """

    prompt: str | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    tokens: tuple[int, ...] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


RewardFunction = Callable[[Example, tuple[int, ...], str], float]


@dataclass(frozen=True)
class Task:
    """Examples to draw prompts from, and the reward of a completion: reward(example, tokens, text) -> float."""

    examples: Sequence[Example]
    reward: RewardFunction
    reward_name: str

    def score(self, example: Example, tokens: tuple[int, ...], text: str) -> float:
        """The reward of one completion.

        Raises BadConfig, naming the function, if it raises or what it returns is no finite number.
        """
        with own_code(self.reward_name, field="task.reward", function=self.reward):
            value = self.reward(example, tokens, text)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise BadConfig(
                field="task.reward",
                found=repr(value)[:80],
                allowed="a finite number",
                reason=f"{self.reward_name} gave it.",
            )
        return number


def open_task(section: TaskSection, folder: Path) -> Task:
    """The task that a configuration names; paths and modules are relative to `folder`, the configuration file's.

    Raises BadConfig (unknown data set, bad line, missing file, missing or failing function) and EmptyBatch (no
    example).
    """
    if section.source == "reasoning_gym":
        return _reasoning_gym(section)
    assert section.reward is not None
    reward = import_function(section.reward, field="task.reward", folder=folder)
    if section.source == "jsonl":
        assert section.path is not None
        path = folder / section.path
        examples, origin = read_examples(path), str(path)
    else:
        assert section.prompts is not None
        make = import_function(section.prompts, field="task.prompts", folder=folder)
        with own_code(section.prompts, field="task.prompts, called with task.settings", function=make):
            made = list(make(**section.settings))
        examples, origin = _checked(made, section.prompts), section.prompts
    if not examples:
        raise EmptyBatch(field="task", found=0, allowed="1 or more examples", reason=f"{origin} holds none.")
    return Task(examples, reward, section.reward)


def read_examples(path: Path) -> list[Example]:
    """The examples of a JSONL file, one object a line with one of the keys of PROMPT_KEYS; empty lines are skipped.

    Raises BadConfig naming the file and the line.
    """
    lines = read_json_lines(path, refusal=BadConfig, field="task.path")
    return [example_from(values, where=where) for where, values in lines]


def example_from(values: Any, *, where: str) -> Example:
    """An example from a mapping; `where` names it in refusals. Raises BadConfig."""
    if not isinstance(values, dict):
        raise BadConfig(field=where, found=repr(values)[:80], allowed="a JSON object", reason="An example has keys.")
    given = [key for key in PROMPT_KEYS if key in values]
    if len(given) != 1:
        raise BadConfig(
            field=where, found=given or "none", allowed=f"one of {PROMPT_KEYS}", reason="It is the prompt, once."
        )
    key = given[0]
    value = values[key]
    if key == "tokens":
        value = token_ids(value, field=f"{where}, key {key!r}")
    elif not _fits(key, value):
        form = 'a list of {"role", "content"}' if key == "messages" else "a string"
        raise BadConfig(field=f"{where}, key {key!r}", found=repr(value)[:80], allowed=form, reason="Wrong type.")
    prompt: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value}
    return Example(**prompt, fields={name: item for name, item in values.items() if name != key})


def _fits(key: str, value: Any) -> bool:
    if key == "messages":
        return (isinstance(value, list) and len(value) > 0) and all(
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and all(isinstance(text, str) for text in message.values())
            for message in value
        )
    return isinstance(value, str)


def _checked(examples: Iterable[Any], origin: str) -> list[Example]:
    """A user's function may return examples or plain mappings."""
    return [
        item if isinstance(item, Example) else example_from(item, where=f"{origin}, example {index}")
        for index, item in enumerate(examples)
    ]


class _ReasoningGymExamples(Sequence[Example]):
    """A reasoning-gym data set seen as examples, generated as they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        entry = self._dataset[index]
        return Example(prompt=entry["question"], fields=entry)


def _reasoning_gym(section: TaskSection) -> Task:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        raise BadConfig(
            field="task.source",
            found="reasoning_gym",
            allowed="an installed reasoning-gym, or source = 'jsonl' or 'function'",
            reason="The package is missing: pip install 'isojax[tasks]'.",
        ) from None
    if section.name not in DATASETS:
        raise BadConfig(
            field="task.name",
            found=section.name,
            allowed=sorted(DATASETS),
            reason="reasoning-gym has no such data set.",
        )
    settings = {"seed": 0, "size": section.size, **section.settings}
    try:
        dataset = reasoning_gym.create_dataset(section.name, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise BadConfig(
            field="task.settings", found=section.settings, allowed=f"what {section.name} takes", reason=str(error)
        ) from None

    def reward(example: Example, tokens: tuple[int, ...], text: str) -> float:
        return dataset.score_answer(text.strip(), example.fields)

    return Task(_ReasoningGymExamples(dataset), reward, f"reasoning_gym {section.name}")
