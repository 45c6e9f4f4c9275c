"""Numbers and texts that fit a schema: from the sentence where it has one, else a sample."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from fractions import Fraction
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from uuid import UUID

from kedge.practice.regex_sample import UnsupportedPattern, pattern_matches, sample_match
from kedge.practice.sentence_values import MAX_SENTENCE_LENGTH, SentenceValues

JsonSchema = Mapping[str, Any]
MAX_TEXT_LENGTH = 10_000

_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How to find a text of a format, one for when there is none, and a check of what was found."""

    pattern: str
    example: str
    check: Callable[[str], object]  # raises ValueError

    def find_all(self, sentence: str) -> list[str]:
        """Find the candidates of a sentence."""
        return [each[0] for each in re.finditer(self.pattern, sentence, re.IGNORECASE)]

    def matches(self, value: str) -> bool:
        """Whether a text has the format."""
        try:
            self.check(value)
        except ValueError:
            return False
        return bool(re.fullmatch(self.pattern, value, re.IGNORECASE))


FORMATS: Mapping[str, TextFormat] = {
    "date": TextFormat(_DATE, "2025-01-31", date.fromisoformat),
    "time": TextFormat(rf"(?<!\S){_TIME}", "12:00:00Z", time.fromisoformat),
    "date-time": TextFormat(rf"{_DATE}T{_TIME}", "2025-01-31T12:00:00Z", datetime.fromisoformat),
    "duration": TextFormat(r"\bP(?:\d+[YMWD])+(?:T(?:\d+[HMS])+)?|\bPT(?:\d+[HMS])+", "PT1H", str),
    "email": TextFormat(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", "ada@example.com", str),
    "hostname": TextFormat(r"\b(?:[a-z0-9]{1,63}\.)+[a-z]{2,63}\b", "example.com", str),
    "ipv4": TextFormat(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "192.0.2.1", IPv4Address),
    "ipv6": TextFormat(r"(?<!\S)[0-9a-f:]{0,39}::?[0-9a-f:]{1,39}", "2001:db8::1", IPv6Address),
    "uuid": TextFormat(
        r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
        "00000000-0000-4000-8000-000000000000",
        UUID,
    ),
    "uri": TextFormat(r"\bhttps?://[^\s\"'<>]+", "https://example.com/", str),
}


def sample_text(schema: JsonSchema, hints: SentenceValues, fallback: str) -> str:
    """Find or make a text; ``spare`` is for when the sentence holds none and any text will do."""
    if wanted := FORMATS.get(str(schema.get("format"))):
        said = (each.rstrip(".,;") for each in wanted.find_all(hints.sentence))
        return next((each for each in said if text_fits(each, schema)), wanted.example)
    if isinstance(pattern := schema.get("pattern"), str):
        with suppress(UnsupportedPattern):
            return hints.pop_text(lambda value: text_fits(value, schema)) or sample_match(pattern)
    said = hints.pop_text(lambda value: text_fits(value, schema))
    return said if said is not None else fit_length(fallback, schema)


def text_fits(value: str, schema: JsonSchema) -> bool:
    """Whether a text satisfies the schema; a pattern that cannot be read is taken on trust."""
    least, most = _read_length_bounds(schema)
    if not least <= len(value) <= most:
        return False
    if (wanted := FORMATS.get(str(schema.get("format")))) and not wanted.matches(value):
        return False
    if isinstance(pattern := schema.get("pattern"), str) and len(value) <= MAX_SENTENCE_LENGTH:
        with suppress(UnsupportedPattern):
            return pattern_matches(pattern, value)
    return True


def is_unconstrained(schema: JsonSchema) -> bool:
    """Whether any text of the right length will do."""
    return "format" not in schema and "pattern" not in schema


def fit_length(value: str, schema: JsonSchema) -> str:
    """Bring a text to a length that the schema allows."""
    least, most = _read_length_bounds(schema)
    if len(value) < least:
        filling = value or "text "
        value = (filling * (least // len(filling) + 1))[:least]
    return value[: int(most)] if len(value) > most else value


def _read_length_bounds(schema: JsonSchema) -> tuple[int, float]:
    least = min(_read_count(schema.get("minLength"), 0), MAX_TEXT_LENGTH)
    return least, _read_count(schema.get("maxLength"), math.inf)


def _read_count(value: Any, default: Any) -> Any:
    return value if isinstance(value, int) and value >= 0 else default


def sample_number(schema: JsonSchema, hints: SentenceValues, kind: str) -> float:
    """Find or make a number."""
    said = hints.pop_number(lambda value: number_fits(value, schema, kind))
    return (
        _to_number(_find_number(schema, is_integer=kind == "integer"))
        if said is None
        else _to_number(_to_fraction(said))
    )


def number_fits(value: object, schema: JsonSchema, kind: str) -> bool:
    """Whether a value is a number within the schema's bounds."""
    return _is_number(value) and _is_within(
        _to_fraction(value), schema, is_integer=kind == "integer"
    )


def _is_within(value: Fraction, schema: JsonSchema, *, is_integer: bool) -> bool:
    def holds(word: str, test: Callable[[Fraction, Fraction], bool]) -> bool:
        limit = schema.get(word)
        return not _is_number(limit) or test(value, _to_fraction(limit))

    return (not is_integer or value.denominator == 1) and all(
        holds(word, test) for word, test in BOUND_CHECKS.items()
    )


BOUND_CHECKS: Mapping[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: step == 0 or value % step == 0,
}


def _find_number(schema: JsonSchema, *, is_integer: bool) -> Fraction:
    """Try what lies about the ends of the range, on the steps of it; one and zero come first."""
    limits = [_to_fraction(schema[word]) for word in BOUND_CHECKS if _is_number(schema.get(word))]
    step = (
        abs(_to_fraction(schema["multipleOf"]))
        if _is_number(schema.get("multipleOf"))
        else Fraction(1)
    )
    if is_integer:
        step = Fraction(step.numerator)  # the whole multiples of p/q are the multiples of p
    step = step or Fraction(1)
    starts = [Fraction(1), Fraction(0), *limits, sum(limits, Fraction()) / (len(limits) or 1)]
    for start in starts:
        near = math.ceil(start / step) * step
        for value in (start, near, near + step, near - step):
            if _is_within(value, schema, is_integer=is_integer):
                return value
    return starts[0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _to_fraction(value: Any) -> Fraction:
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


def _to_number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)
