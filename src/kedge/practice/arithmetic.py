"""Arithmetic, exactly and within bounds, without ``eval``.

A sentence is a sum when, after its opening words and with the words for operators replaced, it is
nothing but numbers, operators and parentheses. Values are fractions, so 0.1 + 0.2 is 0.3; a
number that grows past ``MOST_BITS`` stops the sum.
"""

import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from kedge.practice.rule import TextResult, Utterance, prefix_rule

MAX_LENGTH = 200
MAX_DEPTH = 20
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
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\*\*|[-+*/%()])")
OPERATORS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, lambda left, right: left / right),
    "%": (2, operator.mod),
}


class NumberTooLarge(ArithmeticError):
    """A number of this sum is beyond the bounds."""


def calculate(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Work out a sum and show it."""
    shown = match["sum"].strip()
    try:
        value = evaluate(shown)
    except ZeroDivisionError:
        return TextResult("Nothing can be divided by zero.")
    except NumberTooLarge:
        return TextResult("That number is too big for me.")
    if value is None:
        return None
    exact, text = format_fraction(value)
    number = int(value) if value.denominator == 1 else float(value)
    return TextResult(f"{shown} {'=' if exact else 'is about'} {text}.", number)


def evaluate(text: str) -> Fraction | None:
    """Work out an expression; None where the text is not one."""
    tokens = _tokenize(text)
    if not tokens or not any(token in "+-*/%**" for token in tokens[1:]):
        return None
    try:
        value, rest = _parse_sum(tokens, 0, 0)
    except (IndexError, ValueError):
        return None
    return value if rest == len(tokens) else None


def format_fraction(value: Fraction) -> tuple[bool, str]:
    """Write a number in decimals, and say whether that is exact."""
    if value.denominator == 1:
        return True, str(value.numerator)
    rounded = Context(prec=PRECISION).divide(Decimal(value.numerator), Decimal(value.denominator))
    return Fraction(rounded) == value, f"{rounded.normalize():f}"


def _tokenize(text: str) -> list[str] | None:
    if len(text) > MAX_LENGTH:
        return None
    for word, sign in WORD_OPERATORS:
        text = re.sub(word, sign, text, flags=re.IGNORECASE)
    tokens: list[str] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        if (token := TOKEN.match(text, at)) is None:
            return None
        tokens.append(token[1])
        at = token.end()
    return tokens


def _parse_sum(
    tokens: list[str], position: int, depth: int, level: int = 1
) -> tuple[Fraction, int]:
    """Read a chain of operators of this level or a higher one (precedence climbing)."""
    left, position = _parse_signed(tokens, position, depth)
    while position < len(tokens) and OPERATORS.get(tokens[position], (0,))[0] >= level:
        strength, work = OPERATORS[tokens[position]]
        right, position = _parse_sum(tokens, position + 1, depth, strength + 1)
        left = _check_bounds(work(left, right))
    return left, position


def _parse_signed(tokens: list[str], position: int, depth: int) -> tuple[Fraction, int]:
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if tokens[position] in "+-":
        value, at_next = _parse_signed(tokens, position + 1, depth + 1)
        return (-value if tokens[position] == "-" else value), at_next
    value, position = _parse_atom(tokens, position, depth)
    if position < len(tokens) and tokens[position] == "**":
        exponent, position = _parse_signed(tokens, position + 1, depth + 1)
        value = _compute_power(value, exponent)
    return value, position


def _parse_atom(tokens: list[str], position: int, depth: int) -> tuple[Fraction, int]:
    if tokens[position] == "(":
        value, position = _parse_sum(tokens, position + 1, depth + 1)
        if tokens[position] != ")":
            raise ValueError("a parenthesis is open")
        return value, position + 1
    return _check_bounds(Fraction(tokens[position])), position + 1


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
        (*"-(.0123456789", "what", "how much", "calculate", "compute", "work out", "evaluate"),
        r"(?:what(?:'s| is)|how much is|calculate|compute|work out|evaluate)?\s*"
        rf"(?!.{{{MAX_LENGTH}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
        calculate,
    ),
)
