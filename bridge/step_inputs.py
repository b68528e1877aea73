"""A step's operands on a card: vLLM's own device tensors, padded to a sealed bucket without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from contracts.errors import LaunchRefused

BUFFERS = ("tokens", "positions", "requests", "slots")

# T: tokens of the padded step, N: tokens as vLLM gives them, R: requests, P: pages a request.


@dataclass(frozen=True)
class BatchTensors:
    """vLLM's description of a step, all on the device and at addresses that a captured graph may hold.

    query_start_loc: int32 [R + 1], the first token of each request, then the number of real tokens; requests that only
    pad a graph have none. slot_mapping: int64 [N], a token's row in the cache, -1 on padding. block_table: int32
    [R, P], a request's blocks.
    """

    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True)
class StepOperands:
    """What the regions of a step take. Padding rows have token 0, position 0 and request -1, and are inert.

    tokens, positions, request_of_token: int32 [T]. slots: int32 [T], a token's row in the cache seen as rows of [K, D]
    from the first key page on, -1 on padding. page_table: int32 [sealed R, sealed P], a request's key pages.
    """

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    request_of_token_T: torch.Tensor
    slots_T: torch.Tensor
    page_table_RP: torch.Tensor


class StepInputs(nn.Module):
    """The buffers of every bucket, made once: captured graphs hold their addresses.

    All of it is device work on the current stream, so it is captured with the forward and replayed with it.
    """

    rows: torch.Tensor
    page_table: torch.Tensor

    def __init__(
        self, token_buckets: Sequence[int], requests: int, request_pages: int, page: int, device: torch.device
    ) -> None:
        """token_buckets: ascending, in tokens. requests, request_pages: of the sealed page table. page: in tokens."""
        super().__init__()
        self.token_buckets = tuple(token_buckets)
        self._page = page
        # Buffers, because vLLM keeps a model's buffers through a deep sleep.
        self.register_buffer("rows", _int32(self.token_buckets[-1], device, arange=True), persistent=False)
        table = torch.zeros(requests, request_pages, dtype=torch.int32, device=device)
        self.register_buffer("page_table", table, persistent=False)
        for bucket in self.token_buckets:
            for name in BUFFERS:
                self.register_buffer(f"{name}_{bucket}", _int32(bucket, device), persistent=False)

    def bucket_of(self, tokens: int) -> int:
        """The smallest sealed bucket that holds this many tokens. Raises LaunchRefused beyond the largest."""
        return smallest_bucket(self.token_buckets, tokens, "tokens of a step")

    def profiling(self, tokens: int) -> StepOperands:
        """Padding rows alone, for a forward of this many tokens without a cache."""
        bucket = self.bucket_of(tokens)
        tokens_T, positions_T, requests_T, slots_T = self._of_bucket(bucket)
        tokens_T.zero_()
        positions_T.zero_()
        requests_T.fill_(-1)
        slots_T.fill_(-1)
        return StepOperands(tokens_T, positions_T, requests_T, slots_T, self.page_table)

    def prepare(self, input_ids_N: torch.Tensor, positions_N: torch.Tensor, batch: BatchTensors) -> StepOperands:
        """The operands of a step of real tokens, or of a graph's capture."""
        count = input_ids_N.shape[0]
        bucket = self.bucket_of(count)
        tokens_T, positions_T, requests_T, slots_T = self._of_bucket(bucket)
        filled = (tokens_T, positions_T, requests_T, slots_T, self.page_table)
        ends_R = batch.query_start_loc[1:]
        if self.rows.is_cuda:
            from bridge.device_step import fill_on_card

            given = (input_ids_N, positions_N, ends_R, batch.slot_mapping, batch.block_table)
            fill_on_card(*given, filled, self._page)
            return StepOperands(*filled)
        rows_T = self.rows[:bucket]
        # Padding requests end where the last real one does, so every real token is counted to its own request.
        torch.searchsorted(ends_R, rows_T, right=True, out_int32=True, out=requests_T)
        padding_T = rows_T >= ends_R[-1]
        requests_T.masked_fill_(padding_T, -1)
        for padded_T, given_N in ((tokens_T, input_ids_N), (positions_T, positions_N)):
            padded_T[:count].copy_(given_N)
            # In a graph the rows behind the real ones still hold what an earlier, longer step left there.
            padded_T.masked_fill_(padding_T, 0)
        requests, pages = batch.block_table.shape
        pages = min(pages, self.page_table.shape[1])
        # A block is a page of keys followed by one of values: pages are counted twice as fast as blocks.
        torch.mul(batch.block_table[:, :pages], 2, out=self.page_table[:requests, :pages])
        slots_N = batch.slot_mapping[:count]
        slots_T[:count].copy_(slots_N + torch.div(slots_N, self._page, rounding_mode="floor") * self._page)
        # vLLM marks padding with -1 as well, but only up to its own number of rows.
        slots_T.masked_fill_(padding_T | (slots_T < 0), -1)
        return StepOperands(*filled)

    def _of_bucket(self, bucket: int) -> list[torch.Tensor]:
        return [self.get_buffer(f"{name}_{bucket}") for name in BUFFERS]


def smallest_bucket(buckets: Sequence[int], count: int, what: str) -> int:
    """The smallest of ascending buckets that holds `count`. Raises LaunchRefused beyond the largest."""
    for bucket in buckets:
        if bucket >= count:
            return bucket
    raise LaunchRefused(
        field=what, found=count, allowed=f"at most {buckets[-1]}", reason="The policy's bundle holds no larger bucket."
    )


def _int32(size: int, device: torch.device, *, arange: bool = False) -> torch.Tensor:
    if arange:
        return torch.arange(size, dtype=torch.int32, device=device)
    return torch.zeros(size, dtype=torch.int32, device=device)
