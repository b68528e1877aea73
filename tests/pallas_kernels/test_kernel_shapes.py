"""Shapes that can't be sealed are refused when they are written down, with the field, the value and the reason."""

import json

import pytest

from contracts.errors import BadConfig
from pallas_kernels.kernel_shapes import KernelShapes


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_buckets": (8, 12)}, r"kernels\.token_buckets: found \(8, 12\).*multiples of 8"),
        ({"token_buckets": ()}, "token_buckets"),
        ({"token_buckets": (16, 8)}, "ascending"),
        ({"token_buckets": (8, 8)}, "ascending"),
        ({"token_buckets": [8]}, "token_buckets"),
        ({"head_rows": (0,)}, "head_rows"),
        ({"head_rows": (True,)}, "head_rows"),
        ({"trainer_tokens": (64,)}, r"trainer_tokens.*multiples of 128.*blocks of 128"),
        ({"page_size": 24}, r"page_size: found 24.*16, 32"),
        ({"max_pages": 2**27}, "32 bits"),
        ({"max_pages": 0}, "max_pages"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_context": -1}, "max_context"),
        ({"max_context": 16384, "max_pages": 1000}, r"max_pages: found 1000.*at least 1024"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(fields, says):
    with pytest.raises(BadConfig, match=says):
        KernelShapes(**fields)


def test_shapes_come_back_from_json_and_take_the_context_of_the_policy():
    shapes = KernelShapes().for_context(1000)
    assert (shapes.max_context, shapes.request_pages) == (1000, 63)
    assert KernelShapes.from_json(json.loads(json.dumps(shapes.to_json()))) == shapes
    assert KernelShapes(max_context=500).for_context(1000).max_context == 500
    with pytest.raises(BadConfig, match=r"max_context: found 2000.*at most 1000"):
        KernelShapes(max_context=2000).for_context(1000)


@pytest.mark.parametrize(
    ("requests", "buckets"), [(1, (8,)), (8, (8,)), (9, (8, 16)), (16, (8, 16)), (40, (8, 16, 64)), (999, (8, 16, 64))]
)
def test_decode_steps_have_the_buckets_that_hold_a_token_of_each_request(requests, buckets):
    assert KernelShapes(token_buckets=(8, 16, 64), max_requests=requests).decode_buckets == buckets
