"""Exact arithmetic without ``eval``.

A sentence is an expression if, after its opening words, it consists of numbers, ``+``, ``-``, ``*``, ``/`` and
parentheses. Values are fractions, so 0.1 + 0.2 is 0.3.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from kedge.practice.rule import TextResult, Utterance, prefix_rule

MAX_LENGTH = 200
"""The maximum length of an expression, which also bounds its value."""
PRECISION = 12

ALLOWED_CHARS = re.compile(r"[\d\s.+*/()-]+")
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
}


def calculate(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Evaluate an expression and return a text with the expression and its value."""
    expression = match["sum"].strip()
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return TextResult("Nothing can be divided by zero.")
    if value is None:
        return None
    exact, text = format_fraction(value)
    number = int(value) if value.denominator == 1 else float(value)
    return TextResult(f"{expression} {'=' if exact else 'is about'} {text}.", number)


def evaluate(text: str) -> Fraction | None:
    """Evaluate an expression; None if the text is not one."""
    text = LEADING_ZEROS.sub("", text.strip())
    if len(text) > MAX_LENGTH or not ALLOWED_CHARS.fullmatch(text):
        return None
    try:
        # Parsed as Python, which has the same precedence, and never executed.
        tree = ast.parse(text, mode="eval").body
        is_sum = any(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        return _evaluate_node(tree, text) if is_sum else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def format_fraction(value: Fraction) -> tuple[bool, str]:
    """Format a number in decimals; also return whether that is exact."""
    if value.denominator == 1:
        return True, str(value.numerator)
    rounded = Context(prec=PRECISION).divide(Decimal(value.numerator), Decimal(value.denominator))
    return Fraction(rounded) == value, f"{rounded.normalize():f}"


def _evaluate_node(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            return Fraction(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _evaluate_node(operand, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_evaluate_node(left, text), _evaluate_node(right, text))
        case _:
            raise ValueError("not arithmetic")


RULES = (
    prefix_rule(
        "do a sum",
        r"(?:what(?:'s| is)|how much is|calculate)?\s*"
        rf"(?!.{{{MAX_LENGTH}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
        calculate,
    ),
)
