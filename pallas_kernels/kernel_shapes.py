"""The shapes that a policy's kernels are sealed for: buckets of the trainer and the engine, and limits of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from contracts.errors import BadConfig

#: wgmma takes tokens in steps of this.
TOKEN_STEP = 8
#: Rows of the fused head's block: the trainer's token counts are multiples of it.
TRAINER_STEP = 128
PAGE_SIZES = (16, 32, 64, 128, 256)
#: TMA's coordinates, and the kernels' row numbers, have 32 bits.
ROW_LIMIT = 2**31


@dataclasses.dataclass(frozen=True)
class KernelShapes:
    """What is sealed; any other shape is refused at run time, never lowered. All are counts.

    token_buckets: tokens of an engine step, which is padded to the next one. head_rows: rows of log-probabilities that
    one call computes, on either side. trainer_tokens: tokens of a trainer's micro-batch. page_size: tokens a page of
    the cache. max_pages: a bound on the pages of one layer's cache, whose number depends on the card's free memory: a
    cache with fewer takes the same kernels. max_requests, max_context: rows of the block table, and tokens that a row
    of it can hold; 0 takes the policy's longest context.

    Raises BadConfig for a field out of range.
    """

    token_buckets: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    head_rows: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    trainer_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192)
    page_size: int = 16
    max_pages: int = 2**20
    max_requests: int = 256
    max_context: int = 0

    def __post_init__(self) -> None:
        for name, step, why in (
            ("token_buckets", TOKEN_STEP, "The tensor cores take tokens in steps of 8."),
            ("head_rows", TOKEN_STEP, "The tensor cores take rows in steps of 8."),
            ("trainer_tokens", TRAINER_STEP, "The fused head takes tokens in blocks of 128."),
        ):
            self._check_buckets(name, step, why)
        for name, smallest in (("max_pages", 1), ("max_requests", 1), ("max_context", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise _bad(name, value, f"an integer from {smallest}", "It is a count.")
        if self.page_size not in PAGE_SIZES:
            raise _bad("page_size", self.page_size, list(PAGE_SIZES), "Pages and key blocks divide each other.")
        if self.max_pages * self.page_size >= ROW_LIMIT:
            raise _bad(
                "max_pages",
                self.max_pages,
                f"below {ROW_LIMIT // self.page_size} at page_size {self.page_size}",
                "Rows of the cache are numbered with 32 bits.",
            )
        if self.request_pages > self.max_pages:
            raise _bad(
                "max_pages", self.max_pages, f"at least {self.request_pages}", "One request of max_context must fit."
            )

    def _check_buckets(self, name: str, step: int, why: str) -> None:
        values = getattr(self, name)
        legal = isinstance(values, tuple) and all(type(v) is int and v > 0 and v % step == 0 for v in values)
        if not legal or not values or list(values) != sorted(set(values)):
            raise _bad(name, values, f"ascending multiples of {step}", why)

    @property
    def request_pages(self) -> int:
        """Columns of the block table: pages that one request can hold."""
        return -(-self.max_context // self.page_size)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Buckets of steps in which every request has one token: up to the first that holds all requests."""
        return tuple(
            bucket
            for bucket, before in zip(self.token_buckets, (0, *self.token_buckets), strict=False)
            if before < self.max_requests
        )

    def for_context(self, max_position: int) -> KernelShapes:
        """These shapes with max_context filled in from a policy's longest context. Raises BadConfig beyond it."""
        if self.max_context > max_position:
            raise _bad("max_context", self.max_context, f"at most {max_position}", "Its rope table ends there.")
        return self if self.max_context else dataclasses.replace(self, max_context=max_position)

    def lacking(self, wanted: KernelShapes) -> tuple[str, ...]:
        """Names of the fields in which these shapes do not hold all of `wanted`: a size or the limit is missing."""
        buckets = ("token_buckets", "head_rows", "trainer_tokens")
        limits = ("max_pages", "max_requests", "max_context")
        found = [name for name in buckets if not set(getattr(wanted, name)) <= set(getattr(self, name))]
        found += [name for name in limits if getattr(wanted, name) > getattr(self, name)]
        return (*found, *(("page_size",) if wanted.page_size != self.page_size else ()))

    def to_json(self) -> dict[str, int | list[int]]:
        """Plain numbers and lists by field name."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KernelShapes:
        """The inverse of `to_json`. Raises TypeError for another set of fields."""
        fields: dict[str, Any] = {n: tuple(item) if isinstance(item, list) else item for n, item in value.items()}
        return cls(**fields)


def _bad(name: str, found: object, allowed: object, reason: str) -> BadConfig:
    return BadConfig(field=f"kernels.{name}", found=found, allowed=allowed, reason=reason)
