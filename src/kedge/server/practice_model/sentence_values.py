"""Find the values that a sentence names or mentions.

"call add with a=2 and b=3" names its values; "get_weather in Paris" only mentions one.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MAX_SENTENCE_LENGTH = 2_000
_NUMBER = r"[-+]?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?"
_QUOTED = r"\"[^\"]*\"|“[^”]*”|(?<!\w)'[^']*'(?!\w)"
_NAME = r"[A-Za-z_][\w.-]{0,63}"  # unbounded, a long name would be tried from each of its parts
NAMED_VALUE = re.compile(
    rf"\b({_NAME})\s*[=:]\s*({_QUOTED}|\[[^\]]*\]|[^\s,;][^,;]*?)"
    rf"(?=\s+and\b|\s*[,;]|\s+{_NAME}\s*[=:]|[.?!]?\s*\Z)"
)
NAME_BEFORE_VALUE = re.compile(rf"\b({_NAME})\s+({_QUOTED}|{_NUMBER})(?!\w)")
"""A name and a quoted text or a number, without a sign between them."""
QUOTED = re.compile(_QUOTED)
NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w%]|\.\d)")
_WORD = r"[^\s,;?!]*[^\s,;?!.]"  # a dot may be inside, not at the end
_LINK = r"in|for|of|to|about|at|on|from|with|by|named|called|and"
PHRASE = re.compile(
    rf"\b(?:{_LINK})\s+(?:(?:the|a|an|my|your)\s+)?"
    rf"((?:(?!(?:{_LINK})\b){_WORD})(?:\s+(?!(?:{_LINK})\b){_WORD})*)",
    re.IGNORECASE,
)
"""The words after a preposition, up to the next one."""
FIRST_LINKS = re.compile(rf"\A\W*(?:(?:{_LINK})\b\W*)+", re.IGNORECASE)
JSON_START = re.compile(r"[{\[]")
JSON_NAME = re.compile(rf"\b({_NAME})\s*[=:]\s*\Z")
MAX_JSON = 32
WORD = re.compile(r"[\w.-]*\w")
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

NO_VALUE: Any = object()
ANY_TYPE = "any"


def _parse_number(text: str) -> float:
    """Parse a number of JSON.

    Raises:
        ValueError: It is not finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


JSON_DECODER = json.JSONDecoder(parse_float=_parse_number, parse_constant=_parse_number)


def has_type(value: object, kind: str) -> bool:
    """Return whether a value has a type of JSON schema."""
    match kind:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case _:
            return kind == ANY_TYPE


def fold_scalar(value: object) -> str | None:
    """Return a text, number or boolean as a text in lower case; None for others, and for texts that are no word."""
    if isinstance(value, str) and len(value) > MAX_SENTENCE_LENGTH:
        return None
    if isinstance(value, str | int | float):
        return str(value).lower()
    return None


class SentenceValues:
    """The values of one sentence.

    Args:
        sentence: The sentence.
        extra: More named values.
        facts: Values without a name, used before those of the sentence.

    Attributes:
        named: The values with a name.
        unnamed: The values without a name; each is used once.
        json_object: The members of all JSON objects of the sentence.
        remainder: The words that are no values.
    """

    def __init__(
        self, sentence: str, extra: Mapping[str, Any] | None = None, facts: Iterable[Any] = ()
    ) -> None:
        self.sentence = sentence[:MAX_SENTENCE_LENGTH]
        self.json_object: dict[str, Any] = {}
        self.named: dict[str, Any] = dict(extra or {})
        self.unnamed: list[Any] = [*facts]
        self._words = f" {' '.join(WORD.findall(self.sentence.lower()))} "

        rest = self._read_json(self.sentence)
        for match in NAMED_VALUE.finditer(rest):
            self.named.setdefault(match[1], _parse_literal(match[2].strip()))
        rest = NAMED_VALUE.sub(" ", rest)
        for match in NAME_BEFORE_VALUE.finditer(rest):
            self.named.setdefault(match[1], _parse_literal(match[2]))

        self.unnamed += [match[0][1:-1] for match in QUOTED.finditer(rest)]
        rest = QUOTED.sub(" ", rest)
        self.unnamed += [_parse_literal(match[0]) for match in NUMBER.finditer(rest)]
        without_numbers = NUMBER.sub(" ", rest)
        self.unnamed += [match[1].strip() for match in PHRASE.finditer(without_numbers)]
        self.remainder = " ".join(FIRST_LINKS.sub("", rest).split()).strip(" .,;:!?")

    def _read_json(self, text: str) -> str:
        """Read the JSON objects and lists of a sentence, and return the rest.

        The members of an object without a name are named values, too.
        """
        rest: list[str] = []
        position = 0
        for json_start in islice(JSON_START.finditer(text), MAX_JSON):
            start = json_start.start()
            if start < position:
                continue
            try:
                value, end = JSON_DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue  # a bracket of the text

            name = JSON_NAME.search(text, position, start)
            if name is not None:
                self.named[name[1]] = value
                start = name.start()
            elif isinstance(value, dict):
                self.json_object |= value
            else:
                self.unnamed.append(value)
            rest.append(text[position:start])
            position = end
        self.named |= self.json_object
        rest.append(text[position:])
        return " ".join(rest)

    def has_unnamed(self, kind: str) -> bool:
        """Return whether a value without a name has this type."""
        return any(has_type(value, kind) for value in self.unnamed)

    def take(self, kind: str) -> Any:
        """Remove and return the first value without a name that has this type, or NO_VALUE."""
        for index, value in enumerate(self.unnamed):
            if has_type(value, kind):
                return self.unnamed.pop(index)
        return NO_VALUE

    def find_mentioned(self, values: Iterable[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or NO_VALUE."""
        for value in values:
            text = fold_scalar(value)
            if text is None:
                continue
            spoken = text.replace("_", " ").strip()
            if f" {text} " in self._words or f" {spoken} " in self._words:
                return value
        return NO_VALUE


def _parse_literal(text: str) -> Any:
    if QUOTED.fullmatch(text):
        return text[1:-1]
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(_NUMBER, text):
        return float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith("["):
        return [
            _parse_literal(part.strip()) for part in text.strip("[]").split(",") if part.strip()
        ]
    return text
