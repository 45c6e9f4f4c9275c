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

from kedge.practice.rule import Heard, Said, opening

LONGEST = 200
DEEPEST = 20
MOST_BITS = 2_048
DIGITS = 12

WORDS = (
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


class TooBig(ArithmeticError):
    """A number of this sum is beyond the bounds."""


def calculate(_: Heard, match: re.Match[str]) -> Said | None:
    """Work out a sum and show it."""
    shown = match["sum"].strip()
    try:
        value = evaluate(shown)
    except ZeroDivisionError:
        return Said("Nothing can be divided by zero.")
    except TooBig:
        return Said("That number is too big for me.")
    if value is None:
        return None
    exact, text = written(value)
    number = int(value) if value.denominator == 1 else float(value)
    return Said(f"{shown} {'=' if exact else 'is about'} {text}.", number)


def evaluate(text: str) -> Fraction | None:
    """Work out an expression; None where the text is not one."""
    tokens = _tokens(text)
    if not tokens or not any(token in "+-*/%**" for token in tokens[1:]):
        return None
    try:
        value, rest = _sum(tokens, 0, 0)
    except (IndexError, ValueError):
        return None
    return value if rest == len(tokens) else None


def written(value: Fraction) -> tuple[bool, str]:
    """Write a number in decimals, and say whether that is exact."""
    if value.denominator == 1:
        return True, str(value.numerator)
    rounded = Context(prec=DIGITS).divide(Decimal(value.numerator), Decimal(value.denominator))
    return Fraction(rounded) == value, f"{rounded.normalize():f}"


def _tokens(text: str) -> list[str] | None:
    if len(text) > LONGEST:
        return None
    for word, sign in WORDS:
        text = re.sub(word, sign, text, flags=re.IGNORECASE)
    tokens: list[str] = []
    at, text = 0, text.rstrip()
    while at < len(text):
        if (token := TOKEN.match(text, at)) is None:
            return None
        tokens.append(token[1])
        at = token.end()
    return tokens


def _sum(tokens: list[str], at: int, depth: int, level: int = 1) -> tuple[Fraction, int]:
    """Read a chain of operators of this level or a higher one (precedence climbing)."""
    left, at = _signed(tokens, at, depth)
    while at < len(tokens) and OPERATORS.get(tokens[at], (0,))[0] >= level:
        strength, work = OPERATORS[tokens[at]]
        right, at = _sum(tokens, at + 1, depth, strength + 1)
        left = _bounded(work(left, right))
    return left, at


def _signed(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if depth > DEEPEST:
        raise ValueError("too deep")
    if tokens[at] in "+-":
        value, at_next = _signed(tokens, at + 1, depth + 1)
        return (-value if tokens[at] == "-" else value), at_next
    value, at = _atom(tokens, at, depth)
    if at < len(tokens) and tokens[at] == "**":
        exponent, at = _signed(tokens, at + 1, depth + 1)
        value = _power(value, exponent)
    return value, at


def _atom(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if tokens[at] != ")":
            raise ValueError("a parenthesis is open")
        return value, at + 1
    return _bounded(Fraction(tokens[at])), at + 1


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a root has no exact value")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MOST_BITS:
        raise TooBig
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise TooBig
    return value


RULES = (
    opening(
        "do a sum",
        (*"-(.0123456789", "what", "how much", "calculate", "compute", "work out", "evaluate"),
        r"(?:what(?:'s| is)|how much is|calculate|compute|work out|evaluate)?\s*"
        rf"(?!.{{{LONGEST}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
        calculate,
    ),
)
