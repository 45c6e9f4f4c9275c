"""Exact, bounded arithmetic without ``eval``.

A sentence is an expression if it consists of numbers, operators and parentheses after its opening words
are removed and words for operators are replaced. Values are fractions, so 0.1 + 0.2 is 0.3; a number of
more than ``MAX_BITS`` bits stops the evaluation.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from kedge.practice.rule import TextResult, Utterance, prefix_rule

MAX_LENGTH = 200
MAX_BITS = 2_048
PRECISION = 12

WORD_OPERATORS = (
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\bplus\b", "+"),
    (r"\bminus\b", "-"),
    (r"\b(?:times|multiplied by)\b|[\u00d7\u00b7]|(?<=\d)\s*x\s*(?=\d)", "*"),
    (r"\b(?:divided by|over)\b|÷", "/"),
    (r"\b(?:to the power of)\b|\^", "**"),
    (r"\bmod(?:ulo)?\b", "%"),
    (r"%\s+of\b", "/ 100 *"),
    (r"\bsquared\b", "** 2"),
    (r"\u2212", "-"),
)
ALLOWED_CHARS = re.compile(r"[\d\s.+*/%()-]+")
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.Mod: operator.mod,
}


class NumberTooLarge(ArithmeticError):
    """A number of the expression is out of bounds."""


def calculate(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Evaluate an expression and return a text with the expression and its value."""
    expression = match["sum"].strip()
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return TextResult("Nothing can be divided by zero.")
    except NumberTooLarge:
        return TextResult("That number is too big for me.")
    if value is None:
        return None
    exact, text = format_fraction(value)
    number = int(value) if value.denominator == 1 else float(value)
    return TextResult(f"{expression} {'=' if exact else 'is about'} {text}.", number)


def evaluate(text: str) -> Fraction | None:
    """Evaluate an expression; None if the text is not one."""
    if len(text) > MAX_LENGTH:
        return None
    for words, sign in WORD_OPERATORS:
        text = re.sub(words, sign, text, flags=re.IGNORECASE)
    text = LEADING_ZEROS.sub("", text.strip())
    if not ALLOWED_CHARS.fullmatch(text):
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
            return _check_bounds(Fraction(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _evaluate_node(operand, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left, sign, right):
            first = _evaluate_node(left, text)
            second = _evaluate_node(right, text)
            if isinstance(sign, ast.Pow):
                return _compute_power(first, second)
            if type(sign) in OPERATORS:
                return _check_bounds(OPERATORS[type(sign)](first, second))
        case _:
            pass
    raise ValueError("not arithmetic")


def _compute_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a root has no exact value")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise NumberTooLarge
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    return base ** int(exponent)


def _check_bounds(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NumberTooLarge
    return value


RULES = (
    prefix_rule(
        "do a sum",
        r"(?:what(?:'s| is)|how much is|calculate|compute|work out|evaluate)?\s*"
        rf"(?!.{{{MAX_LENGTH}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
        calculate,
    ),
)
