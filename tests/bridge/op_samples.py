"""Small operands and parameters for every region, as its torch op takes them."""

from typing import Any, NamedTuple

import torch

# T tokens; hidden 16, 4 heads over 2 of size 8, feed-forward 32, vocabulary 40, pages of 4 tokens.


class Sample(NamedTuple):
    """Operands in order, optional ones included, and the static parameters."""

    operands: tuple[Any, ...]
    parameters: dict[str, Any]


def sample(region: str, tokens: int = 9, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Sample:
    """Random operands of a region for a number of tokens; raises KeyError for a region without a sample."""
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    positions = torch.arange(tokens, dtype=torch.int32)
    segments = torch.zeros(tokens, dtype=torch.int32)
    pages = (tokens + 3) // 4
    table = torch.arange(1, pages + 1, dtype=torch.int32).reshape(1, pages)
    targets = torch.arange(tokens, dtype=torch.int32) % 40
    q, k, v = floats(tokens, 4, 8), floats(tokens, 2, 8), floats(tokens, 2, 8)
    cache, other_cache = floats(pages + 1, 4, 2, 8), floats(pages + 1, 4, 2, 8)
    cos_sin = torch.randn(tokens, 8, generator=generator)
    temperature = torch.tensor(1.3)
    slots = torch.where(positions == 1, -1, positions + 2)
    softmax = {"scale": 8**-0.5, "split": 512}
    samples = {
        "matmul": Sample((floats(tokens, 16), floats(24, 16), floats(24)), {"leaves": 2, "out_dtype": name_of(dtype)}),
        "gated_matmul": Sample((floats(tokens, 16), floats(24, 16)), {}),
        "rms_norm": Sample((floats(tokens, 16), floats(16)), {"eps": 1e-5}),
        "add_rms_norm": Sample((floats(tokens, 16), floats(tokens, 16), floats(16)), {"eps": 1e-5}),
        "residual_add": Sample((floats(tokens, 16), floats(tokens, 16)), {}),
        "qk_norm_rope": Sample((floats(tokens, 64), cos_sin, floats(8), floats(8)), {"key_heads": 2, "eps": 1e-5}),
        "paged_qk_norm_rope": Sample(
            (floats(tokens, 64), cos_sin, slots, cache, other_cache, floats(8), floats(8)),
            {"key_heads": 2, "eps": 1e-5},
        ),
        "swiglu": Sample((floats(tokens, 64),), {}),
        "attention": Sample((q, k, v, positions, segments, 3), softmax),
        "paged_attention": Sample((q, cache, other_cache, table, segments, positions), softmax),
        # Every token is a request's only one, and all have the same pages.
        "paged_decode_attention": Sample(
            (q, cache, other_cache, table.repeat(tokens, 1), positions, positions), softmax
        ),
        "log_prob_rows": Sample((floats(tokens, 16), floats(40, 16), temperature), {"vocab_size": 37}),
        "token_log_probs": Sample((floats(tokens, 16), floats(40, 16), targets % 37, temperature), {"vocab_size": 37}),
        "cast": Sample((floats(tokens, 16),), {"dtype": "float32"}),
    }
    return samples[region]


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name as regions take it."""
    return str(dtype).removeprefix("torch.")
