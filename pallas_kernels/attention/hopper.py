"""The attention regions on sm90: which kernels run, over which buffers."""

# Dimension letters: T tokens, H query heads, K key heads, D head size.

from __future__ import annotations

from functools import partial

from pallas_kernels.attention.hopper_decode import combine_splits, decode_attention
from pallas_kernels.attention.hopper_softmax import ROWS, Schedule
from pallas_kernels.attention.hopper_source import Packed, Paged
from pallas_kernels.attention.hopper_tiles import APART, Overlap, tiled_attention
from pallas_kernels.hopper_tools import sm_count
from pallas_kernels.program import Buffer, Program, Step


def attention_program(
    T: int,
    H: int,
    K: int,
    D: int,
    *,
    scale: float,
    split: int,
    staged_weights: bool = False,
    overlap: Overlap = APART,
) -> Program:
    """``(q [T, H, D], k [T, K, D], v [T, K, D], positions [T], segment_ids [T], layer) -> out [T, H, D]``.

    Sequences are contiguous and each starts at a row that is a multiple of 8; rows of one that does not become NaN.
    Rows of segment -1 are padding and become zero. ``layer`` is not read: it only names the layer.
    """
    schedule = Schedule(D, split, scale)
    kernel = tiled_attention(T, H, K, schedule, Packed(schedule.block), staged_weights=staged_weights, overlap=overlap)
    buffers = {"q": Buffer((T, H, D), "bfloat16"), "out": Buffer((T, H, D), "bfloat16")}
    buffers |= dict.fromkeys(("k", "v"), Buffer((T, K, D), "bfloat16"))
    buffers |= dict.fromkeys(("positions", "segment_ids"), Buffer((T,), "int32"))
    buffers["layer"] = Buffer((), "int32")
    read = ("q", "k", "v", "positions", "segment_ids")
    views = {"q": (T, H * D), "out": (T, H * D), "k": (T, K * D), "v": (T, K * D)}
    return Program(buffers, (*read, "layer"), ("out",), (Step("attention", kernel, read, ("out",), views),))


def paged_attention_program(
    T: int,
    H: int,
    K: int,
    D: int,
    *,
    pages: int,
    page: int,
    requests: int,
    request_pages: int,
    scale: float,
    split: int,
    single: bool = False,
    lanes: int | None = None,
    staged_weights: bool = False,
) -> Program:
    """``(q, k_cache, v_cache, block_table, request_of_token, positions) -> out``, bit for bit as `attention_program`.

    q and out are [T, H, D], the caches [pages, page, K, D], the table [requests, request_pages], the others [T], int32;
    a padding token's request is -1. ``pages`` is a bound: the caches may have fewer, since only pages that the table
    names are read. ``lanes`` blocks share the splits of a request's only token, by default so many that few tokens fill
    the card. ``single`` promises that no request has two tokens, as in a decode step, and leaves the other kernel out.
    Neither moves a bit. Raises ValueError for more rows of the caches than 32 bits can number.
    """
    # A cache may have more than 2^31 elements: its rows are only reached through TMA, which takes a row and a column of
    # 32 bits each and multiplies with strides of 64.
    if pages * page >= 2**31:
        raise ValueError(f"{pages} pages of {page} positions have more rows than 32 bits can number")
    schedule = Schedule(D, split, scale)
    source = Paged(schedule.block, page)
    splits = -(-request_pages * page // split)
    if lanes is None:
        lanes = max(1, min(splits, 2 * sm_count() // (T * K)))
    buffers = {"q": Buffer((T, H, D), "bfloat16"), "out": Buffer((T, H, D), "bfloat16")}
    buffers |= dict.fromkeys(("k_cache", "v_cache"), Buffer((pages, page, K, D), "bfloat16", True))
    buffers |= dict.fromkeys(("request_of_token", "positions"), Buffer((T,), "int32"))
    buffers["block_table"] = Buffer((requests, request_pages), "int32")
    caches = dict.fromkeys(("k_cache", "v_cache"), (pages * page, K * D))
    by_head = {**caches, "q": (T * H, D), "out": (T * H, D)}
    read = ("q", "k_cache", "v_cache", "positions", "request_of_token", "block_table")
    operands = ("q", "k_cache", "v_cache", "block_table", "request_of_token", "positions")

    steps: tuple[Step, ...] = ()
    last: tuple[str, ...] = ()
    if not single:
        buffers["tiled"] = Buffer((T, H, D), "bfloat16")
        tiles = tiled_attention(T, H, K, schedule, source, single_tokens=False, staged_weights=staged_weights)
        by_token = {**caches, "q": (T, H * D), "tiled": (T, H * D)}
        steps = (Step("tiles", tiles, read, ("tiled",), by_token),)
        last = ("tiled",)
        by_head["tiled"] = (T * H, D)
    # The last kernel of a token's splits takes the other tokens' rows over.
    decode = partial(decode_attention, T, H, K, schedule, source, splits, lanes=lanes, staged_weights=staged_weights)
    if lanes == 1:
        steps += (Step("decode", decode(tiled=not single), (*read, *last), ("out",), by_head),)
        return Program(buffers, operands, ("out",), steps)
    buffers["acc"] = Buffer((T * splits * H, D), "float32")
    buffers["stats"] = Buffer((T * splits * K, 2, ROWS), "float32")
    combine = combine_splits(T, H, K, schedule, splits, tiled=not single)
    steps += (
        Step("decode", decode(), read, ("acc", "stats"), by_head),
        Step("combine", combine, ("acc", "stats", "positions", "request_of_token", *last), ("out",), by_head),
    )
    return Program(buffers, operands, ("out",), steps)
