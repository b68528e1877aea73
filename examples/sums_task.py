"""Sums and differences of reasoning-gym as lines to go on with, behind solved ones: "2 + 3 = 5", ..., "4 - 9 =".

So asked, SmolLM2-135M-Instruct starts with about three right answers in ten; asked in a chat, it talks instead.
"""

from typing import Any

import reasoning_gym

from isojax.rl.tasks import Example

DATASET = "chain_sum"
SOLVED = ("2 + 3 = 5", "9 - 4 = 5", "6 + 8 = 14", "7 - 2 = 5", "8 - 8 = 0", "3 - 9 = -6", "4 + 5 = 9", "5 - 1 = 4")


def examples(**settings: Any) -> list[dict[str, Any]]:
    """The data set's expressions. settings: its own, such as `size`, `seed` and `max_digits`."""
    entries = reasoning_gym.create_dataset(DATASET, **settings)
    solved = "\n".join(SOLVED)
    return [{"text": f"{solved}\n{entry['metadata']['expression']} =", "entry": entry} for entry in entries]


def right(example: Example, tokens: tuple[int, ...], text: str) -> float:
    """1 where reasoning-gym's own scoring gives the full mark, else 0: its marks for half an answer are not paid."""
    score = reasoning_gym.get_score_answer_fn(DATASET)
    return float(score(text.strip(), example.fields["entry"]) == 1.0)
