"""A task of one's own, in tokens: the prompt is a start token and a digit, the answer is the digit, over and over."""

START = 0


def examples(digits: int = 6) -> list[dict[str, object]]:
    """One example a digit; any key beside the prompt is kept for the reward."""
    return [{"tokens": [START, digit], "digit": digit} for digit in range(1, digits + 1)]


def fraction_copied(example, tokens, text) -> float:
    """The fraction of sampled tokens that are the prompt's digit."""
    return sum(token == example.fields["digit"] for token in tokens) / len(tokens)
