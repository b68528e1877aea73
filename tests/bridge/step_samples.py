"""Steps as vLLM's V2 runner describes them."""

import torch

from bridge.step_inputs import BatchTensors

PAGE = 4
REQUESTS, REQUEST_PAGES = 4, 3


class Step:
    """Requests with (tokens before, new tokens), as vLLM lays them out, padded to `tokens` and to `requests`."""

    def __init__(self, spans: list[tuple[int, int]], tokens: int | None = None, requests: int | None = None) -> None:
        self.spans = spans
        real = sum(new for _, new in spans)
        tokens, requests = tokens or real, requests or len(spans)
        starts = torch.tensor([0, *(new for _, new in spans)]).cumsum(0)
        ends = torch.full((requests - len(spans),), real)
        self.table = torch.zeros(requests, 8, dtype=torch.int32)
        # What a graph's padding rows hold is left over from an earlier step.
        self.ids = torch.full((tokens,), 77, dtype=torch.int32)
        self.positions = torch.full((tokens,), 9, dtype=torch.int64)
        slots = torch.full((tokens,), -1, dtype=torch.int64)
        self.owner = torch.full((tokens,), -1, dtype=torch.int32)
        at, block = 0, 1
        for number, (before, new) in enumerate(spans):
            needed = -(-(before + new) // PAGE)
            self.table[number, :needed] = torch.arange(block, block + needed)
            block += needed
            for position in range(before, before + new):
                self.ids[at], self.positions[at], self.owner[at] = 30 + at, position, number
                slots[at] = int(self.table[number, position // PAGE]) * PAGE + position % PAGE
                at += 1
        self.blocks, self.real = block, real
        self.batch = BatchTensors(torch.cat([starts, ends]).to(torch.int32), slots, self.table)
