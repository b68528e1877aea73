"""The attention regions on sm90: which kernels run, over which buffers."""

# Dimension letters: T tokens, H query heads, K key heads, D head size.

from __future__ import annotations

from pallas_kernels.attention.hopper_decode import decode_attention
from pallas_kernels.attention.hopper_parts import MOST_PARTS, Parts, combine_parts
from pallas_kernels.attention.hopper_softmax import Schedule
from pallas_kernels.attention.hopper_source import Packed, Paged
from pallas_kernels.attention.hopper_tiles import tiled_attention
from pallas_kernels.hopper_tools import sm_count
from pallas_kernels.program import Buffer, Program, Step

#: The most memory that the states of single tokens' splits may take.
SCRATCH_BYTES = 2**29


def attention_program(
    T: int,
    H: int,
    K: int,
    D: int,
    *,
    scale: float,
    split: int,
    staged_weights: bool = False,
) -> Program:
    """``(q [T, H, D], k [T, K, D], v [T, K, D], positions [T], segment_ids [T], layer) -> out [T, H, D]``.

    Sequences are contiguous and each starts at a row that is a multiple of 8; rows of one that does not become NaN.
    Rows of segment -1 are padding and become zero. ``layer`` is not read: it only names the layer.
    """
    schedule = Schedule(D, split, scale)
    packed = Packed(schedule.block)
    kernel = tiled_attention(T, H, K, schedule, packed, staged_weights=staged_weights)
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
    blocks: int | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    staged_weights: bool = False,
    single_tokens_only: bool = False,
) -> Program:
    """``(q, k_cache, v_cache, block_table, request_of_token, positions) -> out``, bit for bit as `attention_program`.

    q and out are [T, H, D], the caches [pages, page, K, D], the table [requests, request_pages], the others [T], int32;
    a padding token's request is -1. ``pages`` is a bound: the caches may have fewer, since only pages that the table
    names are read. A request's tokens are contiguous. Those with several tokens are one kernel's; the splits of single
    tokens are spread over ``blocks`` blocks, by default as many as the card takes at once, and where a token has
    several they are merged by a third kernel. Where the states of all those splits could take more than
    ``scratch_bytes``, a token's splits stay together: then so many tokens are there that they fill the card without
    that. Neither moves a bit. With ``single_tokens_only`` there is no kernel for requests with several tokens, whose
    rows are NaN; ``positions`` and ``request_of_token`` must then not be results of the launch before.
    Raises ValueError for more rows of the caches than 32 bits can number.
    """
    # A cache may have more than 2^31 elements: its rows are only reached through TMA, which takes a row and a column of
    # 32 bits each and multiplies with strides of 64.
    if pages * page >= 2**31:
        raise ValueError(f"{pages} pages of {page} positions have more rows than 32 bits can number")
    schedule = Schedule(D, split, scale)
    source = Paged(schedule.block, page)
    parts = _parts(T, H, K, D, min(T, requests), -(-request_pages * page // split), scratch_bytes)
    buffers = {"q": Buffer((T, H, D), "bfloat16"), "out": Buffer((T, H, D), "bfloat16")}
    buffers |= dict.fromkeys(("k_cache", "v_cache"), Buffer((pages, page, K, D), "bfloat16", True))
    buffers |= dict.fromkeys(("request_of_token", "positions"), Buffer((T,), "int32"))
    buffers["block_table"] = Buffer((requests, request_pages), "int32")
    caches = dict.fromkeys(("k_cache", "v_cache"), (pages * page, K * D))
    read = ("q", "k_cache", "v_cache", "positions", "request_of_token", "block_table")
    operands = ("q", "k_cache", "v_cache", "block_table", "request_of_token", "positions")
    decode_options = {"blocks": blocks or sm_count(), "first": single_tokens_only, "staged_weights": staged_weights}
    decode = decode_attention(parts, schedule, source, **decode_options)
    tiling: tuple[Step, ...] = ()
    if not single_tokens_only:
        options = {"single_tokens": False, "staged_weights": staged_weights}
        tiles = tiled_attention(T, H, K, schedule, source, **options)
        tiling = (Step("tiles", tiles, read, ("out",), {**caches, "q": (T, H * D), "out": (T, H * D)}),)
    states: tuple[str, ...] = ()
    merging: tuple[Step, ...] = ()
    if not parts.whole:
        states = ("acc", "stats", "merges")
        buffers |= {"acc": Buffer(parts.acc, "float32"), "stats": Buffer(parts.stats, "float32")}
        buffers["merges"] = Buffer(parts.merges, "int32")
        # Few tokens spread over more blocks, many over larger ones.
        combine = combine_parts(parts, heads=1 if 16 * sm_count() >= parts.singles * H else parts.G)
        merging = (Step("combine", combine, (*states, "out"), ("out",), {"out": (T * H * D,)}),)
    # Over the zeros that the tiles left in the rows of single tokens, as the merge does.
    before = ("out",) if tiling else ()
    views = {**caches, **dict.fromkeys(("q", "out"), (T * H, D))}
    decoding = Step("decode", decode, (*read, *before), ("out", *states), views)
    return Program(buffers, operands, ("out",), (*tiling, decoding, *merging))


def _parts(T: int, H: int, K: int, D: int, singles: int, splits: int, scratch_bytes: int) -> Parts:
    by_split = Parts(T, H, K, D, singles, splits, whole=False)
    if splits > 1 and by_split.most < MOST_PARTS and 4 * by_split.acc[0] * by_split.acc[1] <= scratch_bytes:
        return by_split
    return Parts(T, H, K, D, singles, splits, whole=True)
