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

from kedge.practice.hints import LONGEST, Hints
from kedge.practice.patterns import Unreadable, example, fits

Schema = Mapping[str, Any]
MOST_TEXT = 10_000

_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)"


@dataclass(frozen=True, slots=True)
class Format:
    """How to find a text of a format, one for when there is none, and a check of what was found."""

    pattern: str
    example: str
    check: Callable[[str], object]  # raises ValueError

    def found_in(self, sentence: str) -> list[str]:
        """Find the candidates of a sentence."""
        return [each[0] for each in re.finditer(self.pattern, sentence, re.IGNORECASE)]

    def fits(self, value: str) -> bool:
        """Whether a text has the format."""
        try:
            self.check(value)
        except ValueError:
            return False
        return bool(re.fullmatch(self.pattern, value, re.IGNORECASE))


FORMATS: Mapping[str, Format] = {
    "date": Format(_DATE, "2025-01-31", date.fromisoformat),
    "time": Format(rf"(?<!\S){_TIME}", "12:00:00Z", time.fromisoformat),
    "date-time": Format(rf"{_DATE}T{_TIME}", "2025-01-31T12:00:00Z", datetime.fromisoformat),
    "duration": Format(r"\bP(?:\d+[YMWD])+(?:T(?:\d+[HMS])+)?|\bPT(?:\d+[HMS])+", "PT1H", str),
    "email": Format(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+", "ada@example.com", str),
    "hostname": Format(r"\b(?:[a-z0-9]{1,63}\.)+[a-z]{2,63}\b", "example.com", str),
    "ipv4": Format(r"\b\d{1,3}(?:\.\d{1,3}){3}\b", "192.0.2.1", IPv4Address),
    "ipv6": Format(r"(?<!\S)[0-9a-f:]{0,39}::?[0-9a-f:]{1,39}", "2001:db8::1", IPv6Address),
    "uuid": Format(
        r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b",
        "00000000-0000-4000-8000-000000000000",
        UUID,
    ),
    "uri": Format(r"\bhttps?://[^\s\"'<>]+", "https://example.com/", str),
}


def text(schema: Schema, hints: Hints, spare: str) -> str:
    """Find or make a text; ``spare`` is for when the sentence holds none and any text will do."""
    if wanted := FORMATS.get(str(schema.get("format"))):
        said = (each.rstrip(".,;") for each in wanted.found_in(hints.sentence))
        return next((each for each in said if text_fits(each, schema)), wanted.example)
    if isinstance(pattern := schema.get("pattern"), str):
        with suppress(Unreadable):
            return hints.text(lambda value: text_fits(value, schema)) or example(pattern)
    said = hints.text(lambda value: text_fits(value, schema))
    return said if said is not None else fitted(spare, schema)


def text_fits(value: str, schema: Schema) -> bool:
    """Whether a text satisfies the schema; a pattern that cannot be read is taken on trust."""
    least, most = _lengths(schema)
    if not least <= len(value) <= most:
        return False
    if (wanted := FORMATS.get(str(schema.get("format")))) and not wanted.fits(value):
        return False
    if isinstance(pattern := schema.get("pattern"), str) and len(value) <= LONGEST:
        with suppress(Unreadable):
            return fits(pattern, value)
    return True


def is_free(schema: Schema) -> bool:
    """Whether any text of the right length will do."""
    return "format" not in schema and "pattern" not in schema


def fitted(value: str, schema: Schema) -> str:
    """Bring a text to a length that the schema allows."""
    least, most = _lengths(schema)
    if len(value) < least:
        filling = value or "text "
        value = (filling * (least // len(filling) + 1))[:least]
    return value[: int(most)] if len(value) > most else value


def _lengths(schema: Schema) -> tuple[int, float]:
    least = min(_count(schema.get("minLength"), 0), MOST_TEXT)
    return least, _count(schema.get("maxLength"), math.inf)


def _count(value: Any, otherwise: Any) -> Any:
    return value if isinstance(value, int) and value >= 0 else otherwise


def number(schema: Schema, hints: Hints, kind: str) -> float:
    """Find or make a number."""
    said = hints.number(lambda value: number_fits(value, schema, kind))
    return _plain(_made(schema, whole=kind == "integer")) if said is None else _plain(_exact(said))


def number_fits(value: object, schema: Schema, kind: str) -> bool:
    """Whether a value is a number within the schema's bounds."""
    return _is_number(value) and _within(_exact(value), schema, whole=kind == "integer")


def _within(value: Fraction, schema: Schema, *, whole: bool) -> bool:
    def holds(word: str, test: Callable[[Fraction, Fraction], bool]) -> bool:
        limit = schema.get(word)
        return not _is_number(limit) or test(value, _exact(limit))

    return (not whole or value.denominator == 1) and all(
        holds(word, test) for word, test in LIMITS.items()
    )


LIMITS: Mapping[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "multipleOf": lambda value, step: step == 0 or value % step == 0,
}


def _made(schema: Schema, *, whole: bool) -> Fraction:
    """Try what lies about the ends of the range, on the steps of it; one and zero come first."""
    limits = [_exact(schema[word]) for word in LIMITS if _is_number(schema.get(word))]
    step = (
        abs(_exact(schema["multipleOf"])) if _is_number(schema.get("multipleOf")) else Fraction(1)
    )
    if whole:
        step = Fraction(step.numerator)  # the whole multiples of p/q are the multiples of p
    step = step or Fraction(1)
    starts = [Fraction(1), Fraction(0), *limits, sum(limits, Fraction()) / (len(limits) or 1)]
    for start in starts:
        near = math.ceil(start / step) * step
        for value in (start, near, near + step, near - step):
            if _within(value, schema, whole=whole):
                return value
    return starts[0]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _exact(value: Any) -> Fraction:
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


def _plain(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)
