"""The few token counts that the engine's graphs are run at; a step is padded once, at the entry, to one of them."""

SMALLEST = 8


def bucket_of(count: int) -> int:
    """The smallest bucket that holds `count` rows: 8, 16, 32 and so on."""
    return max(SMALLEST, 1 << (count - 1).bit_length())
