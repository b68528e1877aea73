"""Attention on a card: right, row-invariant, and equal over packed keys, pages, tiles, blocks and splits."""

import pytest
import torch
from gpu_tools import assert_equal_bits, launcher, normal, relative_error

from pallas_kernels.attention.hopper import attention_program, paged_attention_program
from pallas_kernels.attention.spec import DEFAULT_SPLIT as SPLIT
from pallas_kernels.residual_add.hopper import residual_add_program


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Causal attention of queries at positions ``first`` on, [N, H, D], over keys [L, K, D], in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    position = torch.arange(first, first + len(q), device=q.device)
    scores.masked_fill_(torch.arange(len(k), device=q.device)[None, :] > position[:, None], float("-inf"))
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1), v)


class Batch:
    """Sequences packed at multiples of 8 rows, with padding between them and at the end."""

    def __init__(self, lengths: list[int], H: int, K: int, D: int, seed: int = 0) -> None:
        self.lengths, self.H, self.K, self.D = lengths, H, K, D
        self.first = [0]
        for length in lengths:
            self.first.append(self.first[-1] + -(-length // 8) * 8)
        self.T = self.first.pop() + 16
        self.q, self.k, self.v = (normal(self.T, n, D, seed=seed + i) for i, n in enumerate((H, K, K)))
        self.positions = torch.zeros(self.T, dtype=torch.int32, device="cuda")
        self.segments = torch.full((self.T,), -1, dtype=torch.int32, device="cuda")
        for number, (at, length) in enumerate(zip(self.first, lengths, strict=True)):
            self.positions[at : at + length] = torch.arange(length, device="cuda")
            self.segments[at : at + length] = number
            for tensor in (self.q, self.k, self.v):
                # What padding holds must not matter, NaN included.
                tensor[at + length : at + -(-length // 8) * 8] = float("nan")
        self.scale = D**-0.5

    def packed(self, compiler) -> torch.Tensor:
        program = attention_program(self.T, self.H, self.K, self.D, scale=self.scale, split=SPLIT)
        layer = torch.zeros((), dtype=torch.int32, device="cuda")
        return launcher(compiler, program)(self.q, self.k, self.v, self.positions, self.segments, layer)[0]

    def rows(self, number: int, start: int, stop: int) -> slice:
        return slice(self.first[number] + start, self.first[number] + stop)

    def paged(
        self,
        compiler,
        wanted: list[tuple[int, int, int]],
        page: int,
        T: int,
        *,
        least_pages: int = 0,
        bound: int = 0,
        **options,
    ) -> torch.Tensor:
        """Runs queries ``(sequence, start, stop)`` over shuffled pages whose unused positions are NaN.

        They are the last pages of a cache with ``least_pages`` or more; the kernel is lowered for at least ``bound``.
        """
        request_pages = -(-max(self.lengths) // page) + 1
        used_pages = sum(-(-stop // page) for _, _, stop in wanted) + 3
        pages = max(used_pages, least_pages)
        order = pages - 1 - torch.randperm(used_pages, generator=torch.Generator().manual_seed(1))
        nan = {"fill_value": float("nan"), "device": "cuda", "dtype": torch.bfloat16}
        caches = [torch.full((pages, page, self.K, self.D), **nan) for _ in range(2)]
        table = torch.zeros((len(wanted), request_pages), dtype=torch.int32, device="cuda")
        owner = torch.full((T,), -1, dtype=torch.int32, device="cuda")
        position = torch.zeros(T, dtype=torch.int32, device="cuda")
        q = torch.full((T, self.H, self.D), float("nan"), device="cuda").bfloat16()
        at = used = 0
        for request, (number, start, stop) in enumerate(wanted):
            for index in range(-(-stop // page)):
                target = int(order[used])
                used += 1
                table[request, index] = target
                part = self.rows(number, index * page, min(stop, (index + 1) * page))
                for cache, source in zip(caches, (self.k, self.v), strict=True):
                    cache[target, : part.stop - part.start] = source[part]
            count = stop - start
            owner[at : at + count] = request
            position[at : at + count] = torch.arange(start, stop, device="cuda")
            q[at : at + count] = self.q[self.rows(number, start, stop)]
            at += count
        sizes = {"pages": max(pages, bound), "page": page, "requests": len(wanted), "request_pages": request_pages}
        program = paged_attention_program(T, self.H, self.K, self.D, **sizes, scale=self.scale, split=SPLIT, **options)
        run = launcher(compiler, program)
        # The allocator gives the result this memory, so a row that no kernel writes is NaN.
        torch.full_like(q, float("nan"))
        out = run(q, *caches, table, owner, position)[0]
        assert bool((out[at:] == 0).all()), "padding is not inert"
        return out


HEADS = [(2, 2, 64), (3, 1, 64), (8, 1, 128), (14, 2, 64), (16, 2, 128), (4, 2, 256), (4, 2, 80), (4, 2, 96)]
#: The last key of one is the first of its second split; another has three.
LENGTHS = [1, 15, 129, 1025, 16, 2600, 17]


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
def test_packed_attention_is_right_and_alone_equals_together(compiler, H, K, D):
    batch = Batch(LENGTHS, H, K, D)
    out = batch.packed(compiler)
    assert bool((out[batch.segments < 0] == 0).all())
    for number, length in enumerate(LENGTHS):
        rows = batch.rows(number, 0, length)
        expected = _reference(batch.q[rows], batch.k[rows], batch.v[rows], 0, batch.scale)
        assert relative_error(out[rows], expected) < 6e-3, f"length {length}"
    for number in (2, 3, 5):
        alone = Batch([LENGTHS[number]], H, K, D)
        rows = batch.rows(number, 0, LENGTHS[number])
        for name in ("q", "k", "v"):
            getattr(alone, name)[: LENGTHS[number]] = getattr(batch, name)[rows]
        assert_equal_bits(alone.packed(compiler)[: LENGTHS[number]], out[rows], f"sequence {number} alone")


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
@pytest.mark.parametrize("page", [16, 128])
def test_pages_equal_packed_in_prefill_chunks_and_decode(compiler, H, K, D, page):
    batch = Batch(LENGTHS, H, K, D)
    packed = batch.packed(compiler)
    wanted = [(3, 1024, 1025), (5, 1940, 2600), (2, 128, 129), (4, 0, 16), (0, 0, 1), (6, 7, 9)]
    out = batch.paged(compiler, wanted, page, 696)
    at = 0
    for number, start, stop in wanted:
        found = out[at : at + stop - start]
        assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"sequence {number}, {start} to {stop}")
        at += stop - start


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
def test_splits_in_parallel_in_a_mixed_batch_equal_packed(compiler, H, K, D):
    batch = Batch(LENGTHS, H, K, D)
    packed = batch.packed(compiler)
    wanted = [(3, 1024, 1025), (5, 2588, 2600), (2, 128, 129), (4, 0, 16), (0, 0, 1), (6, 16, 17)]
    for options in ({}, {"blocks": 3}, {"scratch_bytes": 0}):
        out = batch.paged(compiler, wanted, 16, 48, **options)
        at = 0
        for number, start, stop in wanted:
            found = out[at : at + stop - start]
            assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"{options}, {number}, {start} on")
            at += stop - start


@pytest.mark.parametrize("least_pages", [0, 2**20])
def test_neither_a_bound_on_the_pages_nor_rows_beyond_32_bit_elements_move_a_bit(compiler, least_pages):
    batch = Batch(LENGTHS, 16, 2, 128)
    assert 2**20 * 16 * 2 * 128 > 2**31
    packed = batch.packed(compiler)
    wanted = [(3, 1024, 1025), (5, 1940, 2600), (2, 128, 129), (4, 0, 16)]
    out = batch.paged(compiler, wanted, 16, 696, least_pages=least_pages, bound=2**20)
    at = 0
    for number, start, stop in wanted:
        found = out[at : at + stop - start]
        assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"sequence {number}, {start} to {stop}")
        at += stop - start


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
def test_parallel_splits_equal_splits_in_turn(compiler, H, K, D):
    batch = Batch(LENGTHS, H, K, D)
    packed = batch.packed(compiler)
    wanted = [(number, length - 1, length) for number, length in enumerate(LENGTHS)]
    for options in ({}, {"blocks": 1}, {"blocks": 3}, {"scratch_bytes": 0}, {"scratch_bytes": 0, "blocks": 5}):
        out = batch.paged(compiler, wanted, 16, 8, **options)
        for row, (number, start, stop) in enumerate(wanted):
            assert_equal_bits(out[row : row + 1], packed[batch.rows(number, start, stop)], f"{options}, {number}")


@pytest.mark.parametrize("page", [16, 128])
def test_single_tokens_of_every_context_equal_packed(compiler, page):
    """More items than blocks, in turns of the lookup, around the edges of blocks and splits and over many of them."""
    lengths = [1, 2, 127, 128, 129, 512, 1023, 1024, 1025, 1300, 2047, 2048, 2049, 4097, 20000]
    batch = Batch(lengths, 16, 4, 128)
    packed = batch.packed(compiler)
    singles = [(number, length - 1, length) for number, length in enumerate(lengths)]
    chunks = [(13, 3000, 3100), (9, 1200, 1290)]
    wanted = [*singles, chunks[0], *singles * 10, chunks[1], *singles[3:], *singles * 20]
    for options in ({}, {"scratch_bytes": 0}):
        out = batch.paged(compiler, wanted, page, 704, **options)
        at = 0
        for number, start, stop in wanted:
            found = out[at : at + stop - start]
            assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"{options}, {number}, {start} on")
            at += stop - start


@pytest.mark.parametrize(("H", "K", "D"), [(1, 1, 64), (9, 1, 128), (64, 1, 80), (64, 1, 128), (128, 2, 256)])
def test_single_tokens_equal_packed_whatever_heads_share_a_key_head(compiler, H, K, D):
    """Of one split, which decode finishes itself, and of several, which it leaves to the merge."""
    lengths = [1, 64, 128, 300, 512, 1023, 1024, 1025, 2049]
    batch = Batch(lengths, H, K, D)
    packed = batch.packed(compiler)
    singles = [(number, length - 1, length) for number, length in enumerate(lengths)]
    for options in ({}, {"blocks": 2}, {"scratch_bytes": 0}):
        out = batch.paged(compiler, singles * 3, 16, 32, **options)
        for row, (number, start, stop) in enumerate(singles * 3):
            assert_equal_bits(out[row : row + 1], packed[batch.rows(number, start, stop)], f"{options}, {number}")


def test_single_tokens_of_contexts_of_one_split_need_no_third_kernel(compiler):
    lengths = [1, 17, 128, 600, 990]
    batch = Batch(lengths, 32, 8, 128)
    packed = batch.packed(compiler)
    wanted = [(number, length - 1, length) for number, length in enumerate(lengths)] * 3 + [(4, 400, 470)]
    out = batch.paged(compiler, wanted, 16, 136)
    at = 0
    for number, start, stop in wanted:
        found = out[at : at + stop - start]
        assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"{number}, {start} on")
        at += stop - start


@pytest.mark.parametrize(
    ("before", "chunk", "after", "T"), [(0, 0, 384, 384), (200, 1200, 40, 1536), (700, 600, 0, 1304)]
)
def test_tiles_and_chunks_of_the_lookup_that_hold_only_one_kind_of_token(compiler, before, chunk, after, T):
    """Tiles of single tokens alone, with and without padding; 512 looked-up tokens without a single one."""
    lengths = [2000, 1, 130, 512, 600, 1300]
    batch = Batch(lengths, 16, 4, 128)
    packed = batch.packed(compiler)
    singles = [
        (1 + number % 5, lengths[1 + number % 5] - 1, lengths[1 + number % 5]) for number in range(before + after)
    ]
    middle = [(0, 700, 700 + chunk)] if chunk else []
    wanted = [*singles[:before], *middle, *singles[before:]]
    for options in ({}, {"scratch_bytes": 0}):
        out = batch.paged(compiler, wanted, 16, T, **options)
        at = 0
        for number, start, stop in wanted:
            found = out[at : at + stop - start]
            assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"{options}, {number}, {start} on")
            at += stop - start


@pytest.mark.parametrize(("H", "K", "D"), HEADS)
@pytest.mark.parametrize("page", [16, 128])
def test_decode_steps_without_tiles_equal_packed_and_pad_with_zeros(compiler, H, K, D, page):
    """What nothing wrote is NaN: `Batch.paged` poisons the memory of the result."""
    batch = Batch(LENGTHS, H, K, D)
    packed = batch.packed(compiler)
    last = [(number, length - 1, length) for number, length in enumerate(LENGTHS)]
    cases = ((8, 7, {}), (8, 1, {}), (136, 100, {"blocks": 5}), (256, 256, {}), (256, 255, {"scratch_bytes": 0}))
    for T, count, options in cases:
        wanted = [last[place * 3 % len(last)] for place in range(count)]
        out = batch.paged(compiler, wanted, page, T, single_tokens_only=True, **options)
        expected = torch.cat([packed[batch.rows(*each)] for each in wanted])
        assert_equal_bits(out[:count], expected, f"{count} single tokens at {T}, {options}")


def test_requests_with_several_tokens_are_nan_not_wrong_where_there_are_no_tiles(compiler):
    batch = Batch(LENGTHS, 16, 2, 128)
    packed = batch.packed(compiler)
    wanted = [(3, 1024, 1025), (6, 7, 9), (5, 2599, 2600), (4, 0, 16), (0, 0, 1)]
    out = batch.paged(compiler, wanted, 16, 24, single_tokens_only=True)
    at = 0
    for number, start, stop in wanted:
        found = out[at : at + stop - start]
        at += stop - start
        if stop - start > 1:
            assert bool(found.isnan().all())
        else:
            assert_equal_bits(found, packed[batch.rows(number, start, stop)], f"{number}, {start}")


@pytest.mark.parametrize("single_tokens_only", [False, True])
def test_decode_which_starts_early_sees_what_was_written_just_before(compiler, single_tokens_only):
    """Each operand is overwritten by the launch right before the region, queued so that nothing lies between them.

    Without tiles not requests and positions, which that kernel reads meanwhile.
    """
    lengths, page, H, K, D = [40, 300, 1024, 1025, 900, 1300, 17, 129], 16, 32, 8, 128
    T, per = len(lengths), -(-max(lengths) // page)
    sizes = {"pages": T * per, "page": page, "requests": T, "request_pages": per}
    options = {"scale": D**-0.5, "split": SPLIT, "single_tokens_only": single_tokens_only}
    run = launcher(compiler, paged_attention_program(T, H, K, D, **sizes, **options))
    table = torch.arange(T * per, device="cuda", dtype=torch.int32).view(T, per)
    owner = torch.arange(T, device="cuda", dtype=torch.int32)
    position = torch.tensor(lengths, device="cuda", dtype=torch.int32) - 1
    caches = [normal(T * per, page, K, D, seed=seed) for seed in (0, 1)]
    versions = [
        (normal(T, H, D, seed=2 + turn), *(cache.roll(turn, 0) for cache in caches), table.roll(turn, 0), owner, moved)
        for turn, moved in ((0, position), (1, position.roll(1)), (2, position.roll(3)))
    ]
    torch.cuda.synchronize()
    expected = [run(*operands)[0].clone() for operands in versions]
    assert not torch.equal(expected[0], expected[1])
    used = [operand.clone() for operand in versions[0]]
    for last in range(4 if single_tokens_only else len(used)):
        for turn in range(60):
            order = [*(place for place in range(len(used)) if place != last), last]
            # Long enough to queue all that follows.
            torch.cuda._sleep(2_000_000)
            for place in order:
                used[place].copy_(versions[turn % 3][place])
            assert_equal_bits(run(*used)[0], expected[turn % 3], f"turn {turn}, operand {last} written last")
    # As in an engine: queries come from a launch that lets this one start, and the result's memory may be what that
    # one still reads.
    add = launcher(compiler, residual_add_program(T, H * D))
    for turn in range(60):
        torch.cuda._sleep(2_000_000)
        for place in (4, 5, 1, 2, 3):
            used[place].copy_(versions[turn % 3][place])
        x = versions[turn % 3][0].view(T, H * D) * 0.5
        q = add(x, x.clone())[0].view(T, H, D)
        del x
        assert_equal_bits(run(q, *used[1:])[0], expected[turn % 3], f"turn {turn}, behind a chained launch")


def test_a_sequence_off_the_row_step_is_nan_not_wrong(compiler):
    batch = Batch([64], 2, 1, 64)
    batch.positions.zero_()
    batch.segments.fill_(-1)
    batch.positions[4:20] = torch.arange(16, device="cuda")
    batch.segments[4:20] = 0
    out = batch.packed(compiler)
    assert bool(out[4:20].isnan().all())
    assert bool((out[20:] == 0).all())
