"""A rollout as plain JSON values and back, with every bit: a checkpoint keeps the one that waits for its step."""

from __future__ import annotations

from typing import Any

import numpy as np

from isojax.rl.collect import Rollout
from isojax.rl.mismatch import Mismatch
from isojax.rl.rollout import Completion


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """A rollout that was checked, as JSON values. JSON's numbers hold every finite float32 exactly."""
    return {
        **vars(rollout),
        "completions": [_completion_values(completion) for completion in rollout.completions],
        "rewards": rollout.rewards.tolist(),
        "groups": rollout.groups.tolist(),
        "mismatch": {**vars(rollout.mismatch), "wrong": sorted(map(list, rollout.mismatch.wrong))},
    }


def rollout_from_json(values: dict[str, Any]) -> Rollout:
    """The inverse of `rollout_to_json`. Raises KeyError, TypeError or ValueError for anything else."""
    completions = tuple(
        Completion(
            **{
                **item,
                "prompt_tokens": tuple(item["prompt_tokens"]),
                "tokens": tuple(item["tokens"]),
                "log_probs": np.array(item["log_probs"], np.float32),
            }
        )
        for item in values["completions"]
    )
    group_size = len(values["groups"][0]) if values["groups"] else 1
    return Rollout(
        **{
            **values,
            "completions": completions,
            "rewards": np.array(values["rewards"], np.float64),
            "groups": np.array(values["groups"], np.int64).reshape(-1, group_size),
            "mismatch": Mismatch(**{**values["mismatch"], "wrong": frozenset(map(tuple, values["mismatch"]["wrong"]))}),
        }
    )


def _completion_values(completion: Completion) -> dict[str, Any]:
    return {
        **vars(completion),
        "prompt_tokens": list(map(int, completion.prompt_tokens)),
        "tokens": list(map(int, completion.tokens)),
        "log_probs": completion.log_probs.tolist(),
    }
