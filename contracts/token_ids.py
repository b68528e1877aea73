"""The one check of token ids, wherever they enter."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from contracts.errors import BadConfig, Refusal

# Token ids are int32 on every device.
_LARGEST = 2**31 - 1


def token_ids(
    values: Any, *, field: str, vocab_size: int | None = None, refusal: type[Refusal] = BadConfig
) -> tuple[int, ...]:
    """Token ids as Python integers, from a list, a tuple or a one-dimensional integer array; never rounded or parsed.

    field: names them in messages. vocab_size: ids beyond it are refused. Raises `refusal` for anything that is not a
    list of ids, with the first wrong item.
    """
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        values = array.tolist() if array.ndim == 1 and array.dtype.kind in "iu" else array
    largest = _LARGEST if vocab_size is None else vocab_size - 1
    allowed = f"a list of token ids from 0 to {largest}"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise refusal(field=field, found=repr(values)[:80], allowed=allowed, reason="Only whole numbers are token ids.")
    # Asked of all at once, since a rollout's prompts have many tokens; which one is wrong is looked for afterwards.
    kinds = set(map(type, values))
    if not kinds or (kinds == {int} and min(values) >= 0 and max(values) <= largest):
        return tuple(values)
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise refusal(
                field=f"{field}[{place}]",
                found=repr(value)[:80],
                allowed=allowed,
                reason="Only whole numbers are token ids.",
            )
        if not 0 <= value <= largest:
            raise refusal(
                field=f"{field}[{place}]",
                found=f"token {value}",
                allowed=allowed,
                reason="The policy's vocabulary ends there.",
            )
    return tuple(map(int, values))
