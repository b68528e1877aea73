"""A program's steps see buffers in other shapes, but never elements that a buffer does not have."""

import jax.numpy as jnp
import pytest

from pallas_kernels.program import Buffer, Program, Step


def _program(views, kernel=None):
    buffers = {"x": Buffer((5, 4), "float32"), "out": Buffer((2, 3), "float32")}
    step = Step("first", kernel, ("x",), ("out",), views)
    return Program(buffers, ("x",), ("out",), (step,))


@pytest.mark.parametrize("shape", [(20,), (2, 10), (4, 4), (6,)])
def test_an_operand_is_seen_in_any_shape_that_its_first_elements_fill(shape):
    seen = []
    x = jnp.arange(20.0).reshape(5, 4)

    def kernel(operand):
        seen.append(operand)
        return (operand.reshape(-1)[:6],)

    (out,) = _program({"x": shape, "out": (6,)}, kernel).run(x)
    assert seen[0].shape == shape
    assert seen[0].reshape(-1).tolist() == x.reshape(-1)[: seen[0].size].tolist()
    assert out.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("views", [{"x": (21,)}, {"x": (3, 7)}, {"out": (5,)}, {"out": (7,)}])
def test_a_view_of_more_elements_or_of_a_part_of_a_result_is_refused(views):
    with pytest.raises(ValueError, match="another number of elements"):
        _program(views)
