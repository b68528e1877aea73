"""The few facts about jaxprs that JAX keeps in its internals, in one place for its versions 0.10 and 0.11."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import flax
from jax._src import config, source_info_util
from jax._src.shard_map import _as_manual_mesh, _extend_axis_env
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import use_abstract_mesh

import pallas_kernels

__all__ = [
    *("Jaxpr", "JaxprEqn", "closed_jaxprs", "context_of", "forward_rule"),
    *("jvp_rule", "manual_axes", "scan_parts", "user_line"),
]

_LIBRARIES = tuple(str(Path(str(library.__file__)).parent) for library in (flax, pallas_kernels))


def closed_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Every jaxpr that an equation holds in its parameters: bodies, branches, conditions."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def forward_rule(equation: JaxprEqn) -> Jaxpr:
    """The jaxpr of a custom_vjp_call's forward rule; its results are the residuals, then the primal results."""
    primals = len(equation.invars) - equation.params["num_consts"]
    jaxpr, _ = equation.params["fwd_jaxpr_thunk"].call_wrapped(*[False] * primals)
    return jaxpr


def jvp_rule(equation: JaxprEqn) -> Jaxpr:
    """The jaxpr of a custom_jvp_call's rule with every input's tangent given; its results, then their tangents."""
    inputs = len(equation.invars) - equation.params["num_consts"]
    jaxpr, *_ = equation.params["jvp_jaxpr_fun"].call_wrapped(*[False] * inputs)
    return jaxpr


def manual_axes(equation: JaxprEqn) -> frozenset[str]:
    """Mesh axes that a shard_map equation makes manual."""
    return frozenset(equation.params["newly_manual_axes"])


@contextmanager
def context_of(equation: JaxprEqn) -> Iterator[None]:
    """Tracing inside of it sees the mesh axes of a shard_map equation; other equations change nothing."""
    with ExitStack() as stack:
        if equation.primitive.name == "shard_map":
            mesh, axes = equation.params["mesh"], equation.params["newly_manual_axes"]
            stack.enter_context(_extend_axis_env(mesh, axes))
            stack.enter_context(use_abstract_mesh(_as_manual_mesh(mesh, axes)))
            stack.enter_context(config._check_vma(equation.params["check_vma"]))
        yield


def user_line(equation: JaxprEqn) -> str | None:
    """`file:line (function)` of the user's code that made an equation, skipping the frames of JAX, Flax and regions.

    None where all frames are theirs.
    """
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return None


def scan_parts(equation: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are the same in every trip, and how many are carried; the rest are stacked."""
    parameters = equation.params
    if "num_carry" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since jax 0.11 the three groups are a tree over the operands.
    fixed, carried, _ = parameters["ft_in"].update(list(equation.invars)).unpack()
    return len(list(fixed)), len(list(carried))
