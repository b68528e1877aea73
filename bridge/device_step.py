"""What `bridge.step_inputs` makes of a step as one Triton kernel, in place of a dozen that do next to nothing each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from contracts.errors import LaunchRefused

# T: tokens of the padded step; R: requests; P: pages a request; N: tokens as vLLM gives them.

ROWS, COLUMNS = 32, 1024


@triton.jit(do_not_specialize=["given", "bucket", "R", "P"])
def _fill(
    ids_N,
    given_positions_N,
    ends_R,
    slot_mapping_N,
    block_table_RP,
    tokens_T,
    positions_T,
    requests_T,
    slots_T,
    page_table_RP,
    given,
    bucket,
    R,
    P,
    block_table_stride,
    page_table_stride,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    row, request = program * ROWS + tl.arange(0, ROWS), tl.arange(0, REQUESTS)
    ends = tl.load(ends_R + request, mask=request < R, other=2**31 - 1)
    real = (row < tl.load(ends_R + R - 1)) & (row < given)
    owner = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    slot = tl.load(slot_mapping_N + row, mask=real, other=-1)
    # A block is a page of keys followed by one of values.
    slot = tl.where(slot < 0, -1, slot + slot // PAGE * PAGE)
    inside = row < bucket
    tl.store(tokens_T + row, tl.load(ids_N + row, mask=real, other=0).to(tl.int32), mask=inside)
    tl.store(positions_T + row, tl.load(given_positions_N + row, mask=real, other=0).to(tl.int32), mask=inside)
    tl.store(requests_T + row, tl.where(real, owner, -1), mask=inside)
    tl.store(slots_T + row, slot.to(tl.int32), mask=inside)
    if program < R:
        for start in range(0, P, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            block = tl.load(block_table_RP + program * block_table_stride + column, mask=column < P, other=0)
            tl.store(page_table_RP + program * page_table_stride + column, 2 * block, mask=column < P)


def fill_on_card(
    ids_N: torch.Tensor,
    given_positions_N: torch.Tensor,
    ends_R: torch.Tensor,
    slot_mapping_N: torch.Tensor,
    block_table_RP: torch.Tensor,
    operands: tuple[torch.Tensor, ...],
    page: int,
) -> None:
    """Fills ``operands``: tokens, positions, requests and slots, int32 [T], and the page table, as `StepOperands` says.

    ids: int32 or int64 [N], with real tokens first. positions: int64 [N]. ends: int32 [R], the token behind each
    request's last. slot_mapping: int64 [N]. block_table: int32 [R, P]. page: tokens. Raises LaunchRefused for more
    requests than a table has rows.
    """
    tokens_T, *_, page_table_RP = operands
    rows = min(block_table_RP.shape[0], page_table_RP.shape[0])
    if ends_R.shape[0] > rows:
        raise LaunchRefused(
            field="requests of a step",
            found=ends_R.shape[0],
            allowed=f"at most {rows}",
            reason="The page table has no more rows.",
        )
    R, bucket = ends_R.shape[0], tokens_T.shape[0]
    P = min(block_table_RP.shape[1], page_table_RP.shape[1])
    given = (ids_N, given_positions_N, ends_R, slot_mapping_N, block_table_RP)
    _fill[(max(R, triton.cdiv(bucket, ROWS)),)](
        *given,
        *operands,
        ids_N.shape[0],
        bucket,
        R,
        P,
        block_table_RP.stride(0),
        page_table_RP.stride(0),
        page,
        triton.next_power_of_2(page_table_RP.shape[0]),
        ROWS,
        COLUMNS,
    )
