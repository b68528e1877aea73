"""Symbolic sizes of a traced function as nodes of a torch.fx graph."""

import ast
import operator
from collections.abc import Callable, Sequence

from torch import fx

from contracts.errors import UncoveredArithmetic

Size = int | fx.Node

_OPERATORS: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {"floordiv": operator.floordiv, "mod": operator.mod}


class Dimensions:
    """Finds each symbol of the trace (the token count `t`) in the inputs and computes sizes from it.

    A size is an integer or an expression over the symbols that prints as, for example, `3*t + 1` or `floordiv(t, 2)`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._known: dict[str, Size] = {}

    def read_from(self, placeholder: fx.Node, shape: Sequence[object]) -> None:
        """Takes from an input the symbols that are whole dimensions of it, each only once."""
        for axis, size in enumerate(shape):
            symbol = str(size)
            if not isinstance(size, int) and symbol.isidentifier() and symbol not in self._known:
                self._known[symbol] = self._graph.create_node("call_method", "size", (placeholder, axis), name=symbol)

    def size(self, size: object) -> Size:
        """The integer, or the node that computes it; raises UncoveredArithmetic for a size the inputs don't give."""
        text = str(size)
        if text.isdigit():
            return int(text)
        if text not in self._known:
            # jax writes a power as t^2, which Python would read as an exclusive or.
            self._known[text] = self._build(ast.parse(text.strip().replace("^", "**"), mode="eval").body, text)
        return self._known[text]

    def sizes(self, shape: Sequence[object]) -> list[Size]:
        """Each size of a shape."""
        return [self.size(size) for size in shape]

    def _build(self, expression: ast.expr, text: str) -> Size:
        match expression:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=symbol) if symbol in self._known:
                return self._known[symbol]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply(operator.neg, self._build(operand, text))
            case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
                return self._apply(_OPERATORS[type(kind)], self._build(left, text), self._build(right, text))
            case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _FUNCTIONS:
                return self._apply(_FUNCTIONS[name], self._build(left, text), self._build(right, text))
        raise UncoveredArithmetic(
            field="size",
            found=text,
            allowed=f"sums, products, floordiv and mod of {sorted(filter(str.isidentifier, self._known))}",
            reason="A size that does not follow from the sizes of the inputs cannot be computed in the engine.",
        )

    def _apply(self, function: Callable[..., object], *operands: Size) -> Size:
        if all(isinstance(operand, int) for operand in operands):
            return function(*operands)  # type: ignore[return-value]
        return self._graph.create_node("call_function", function, operands, name="size")


def is_size(node: fx.Node) -> bool:
    """Whether a node of a translated graph computes a Python integer (a size) and not a tensor."""
    if node.op == "call_method":
        return node.target == "size"
    return node.op == "call_function" and (
        node.target is operator.neg or node.target in _OPERATORS.values() or node.target in _FUNCTIONS.values()
    )
