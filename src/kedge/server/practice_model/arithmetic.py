"""Sums: numbers, ``+``, ``-``, ``*``, ``/`` and parentheses, without ``eval``."""

import ast
import operator
import re
from collections.abc import Callable

MAX_LENGTH = 200
"""The characters of an expression, which bound the size of its value."""
ALLOWED_CHARACTERS = re.compile(r"[\d\s.+*/()-]+")
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
}


def evaluate(text: str) -> float | None:
    """Evaluate an expression.

    Args:
        text: The expression.

    Returns:
        Its value, an int if it is whole; None if the text is no expression.

    Raises:
        ZeroDivisionError: The expression divides by zero.
    """
    if len(text) > MAX_LENGTH or not ALLOWED_CHARACTERS.fullmatch(text):
        return None
    try:
        # Parsed as Python, which has the same precedence, and never executed.
        tree = ast.parse(text.strip(), mode="eval").body
        if not any(isinstance(node, ast.BinOp) for node in ast.walk(tree)):
            return None
        value = _evaluate_node(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if value == int(value):
        return int(value)
    return value


def _evaluate_node(node: ast.expr) -> float:
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.UnaryOp(ast.UAdd(), operand):
            return _evaluate_node(operand)
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate_node(operand)
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            calculate = OPERATORS[type(sign)]
            return calculate(_evaluate_node(left), _evaluate_node(right))
        case _:
            raise ValueError("not a sum")


def format_number(value: float) -> str:
    """Format a number with at most twelve digits after rounding; a whole number has all of its digits."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.12g}"
