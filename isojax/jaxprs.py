"""The few facts about jaxprs that JAX keeps in its internals, in one place for its versions 0.10 and 0.11."""

from collections.abc import Iterator
from pathlib import Path

import flax
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

__all__ = ["Jaxpr", "JaxprEqn", "closed_jaxprs", "forward_rule", "manual_axes", "user_line"]

_FLAX = str(Path(flax.__file__).parent)


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


def manual_axes(equation: JaxprEqn) -> frozenset[str]:
    """Mesh axes that a shard_map equation makes manual."""
    return frozenset(equation.params["newly_manual_axes"])


def user_line(equation: JaxprEqn) -> str | None:
    """`file:line (function)` of the user's code that made an equation, skipping JAX's and Flax's own frames.

    None where all frames are theirs.
    """
    for frame in source_info_util.user_frames(equation.source_info.traceback):
        if not frame.file_name.startswith(_FLAX):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return None
