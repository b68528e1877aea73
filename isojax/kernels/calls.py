"""Every call of a region that trainer and engine make at the sealed shapes, read from the policy's own forward."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from isojax.audit import RegionCall
from isojax.policy.policy import Policy
from isojax.policy_audit import audit_engine, audit_trainer
from pallas_kernels.kernel_shapes import KernelShapes

Parameter = int | float | bool | str
Types = tuple[tuple[tuple[int, ...], str], ...]


class KernelCall(NamedTuple):
    """A region at fixed shapes: (shape, dtype) of every operand in the region's order, and its parameters by name."""

    region: str
    types: Types
    parameters: tuple[tuple[str, Parameter], ...]

    def __str__(self) -> str:
        operands = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in self.types)
        return f"{operands}; {', '.join(f'{name}={value}' for name, value in self.parameters)}"


def kernel_calls(policy: Policy, shapes: KernelShapes) -> list[KernelCall]:
    """The distinct calls, each once. The forward is traced at every bucket, so no list of regions is kept by hand.

    shapes: with max_context filled in. Raises `UncoveredArithmetic`.
    """
    found: dict[KernelCall, None] = {}
    for tokens in shapes.trainer_tokens:
        report = audit_trainer(policy, tokens)
        found.update(dict.fromkeys(map(_kernel_call, (*report.calls, *report.differentiated))))
    # One trace serves a token bucket and a row bucket; where one list is longer, the other's first is traced again.
    first = shapes.token_buckets[0], shapes.head_rows[0]
    for tokens, rows in zip_longest(shapes.token_buckets, shapes.head_rows):
        report = audit_engine(policy, tokens or first[0], rows or first[1])
        found.update(dict.fromkeys(_engine_calls(report.calls, shapes)))
    return list(found)


def _kernel_call(call: RegionCall) -> KernelCall:
    return KernelCall(call.region, call.operands, tuple(sorted(call.parameters.items())))


def _engine_calls(calls: tuple[RegionCall, ...], shapes: KernelShapes) -> Iterator[KernelCall]:
    for call in calls:
        if call.region == "attention":
            yield from _paged_attention(call, shapes)
        elif call.region == "qk_norm_rope":
            yield _paged_qk_norm_rope(call, shapes)
        else:
            yield _kernel_call(call)


def _paged_qk_norm_rope(call: RegionCall, shapes: KernelShapes) -> KernelCall:
    """The binding that writes the cache."""
    qkv, cos_sin, *norms = call.operands
    (tokens, head_size), _ = cos_sin
    cache = ((shapes.max_pages, shapes.page_size, int(call.parameters["key_heads"]), head_size), qkv[1])
    types = (qkv, cos_sin, ((tokens,), "int32"), cache, cache, *norms)
    return KernelCall("paged_qk_norm_rope", types, tuple(sorted(call.parameters.items())))


def _paged_attention(call: RegionCall, shapes: KernelShapes) -> Iterator[KernelCall]:
    """The same queries over a cache that holds the batch's own keys too, and as a step of decoding has them."""
    query, key = call.operands[:2]
    (tokens, _, _), dtype = query
    (_, key_heads, head_size), _ = key
    cache = ((shapes.max_pages, shapes.page_size, key_heads, head_size), dtype)
    table = ((shapes.max_requests, shapes.request_pages), "int32")
    per_token = ((tokens,), "int32")
    types = (query, cache, cache, table, per_token, per_token)
    parameters = tuple(sorted(call.parameters.items()))
    yield KernelCall("paged_attention", types, parameters)
    if tokens in shapes.decode_buckets:
        yield KernelCall("paged_decode_attention", types, parameters)
