"""Find the values that a sentence names or mentions.

"call add with a=2 and b=3" names its values; "get_weather in Paris" only mentions one.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from kedge.server.practice_model.context import fold_case

MAX_SENTENCE_LENGTH = 2_000
_NUMBER = r"[-+]?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?"
_QUOTED = r"\"[^\"]*\"|“[^”]*”|(?<!\w)'[^']*'(?!\w)"
_NAME = r"[A-Za-z_][\w.-]{0,63}"  # unbounded, a long name would be tried from each of its parts
NAMED_VALUE = re.compile(
    rf"\b({_NAME})\s*[=:]\s*({_QUOTED}|\[[^\]]*\]|[^\s,;][^,;]*?)"
    rf"(?=\s+and\b|\s*[,;]|\s+{_NAME}\s*[=:]|[.?!]?\s*\Z)"
)
QUOTED = re.compile(_QUOTED)
NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w%]|\.\d)")
_WORD = r"[^\s,;?!]*[^\s,;?!.]"  # a dot may be inside, not at the end
_LINK = r"in|for|of|to|about|at|on|from|with|by|named|called|and"
PHRASE = re.compile(
    rf"\b(?:{_LINK})\s+(?:(?:the|a|an|my|your)\s+)?"
    rf"((?:(?!(?:{_LINK})\b){_WORD})(?:\s+(?!(?:{_LINK})\b){_WORD})*)",
    re.IGNORECASE,
)
JSON_START = re.compile(r"[{\[]")
JSON_NAME = re.compile(rf"\b({_NAME})\s*[=:]\s*\Z")
MAX_JSON = 32
WORD = re.compile(r"[\w.-]*\w")
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


NO_VALUE: Any = object()


def _parse_number(text: str) -> float:
    """Parse a number of JSON.

    Raises:
        ValueError: It is not finite.
    """
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


JSON_DECODER = json.JSONDecoder(parse_float=_parse_number, parse_constant=_parse_number)


class SentenceValues:
    """The values of one sentence.

    Args:
        sentence: The sentence.
        extra: More named values.
        facts: Values without a name, used before those of the sentence.
    """

    def __init__(
        self, sentence: str, extra: Mapping[str, Any] | None = None, facts: Iterable[Any] = ()
    ) -> None:
        self.sentence = sentence[:MAX_SENTENCE_LENGTH]
        self.json_object: dict[str, Any] = {}
        self._named: dict[str, Any] = dict(extra or {})
        self.unnamed_values: list[Any] = [*facts]
        rest = self._parse_json(self.sentence)
        for found in NAMED_VALUE.finditer(rest):
            self._named.setdefault(found[1], _parse_literal(found[2].strip()))
        rest = NAMED_VALUE.sub(" ", rest)
        texts = [found[0][1:-1] for found in QUOTED.finditer(rest)]
        rest = QUOTED.sub(" ", rest)
        numbers = [_parse_literal(found[0]) for found in NUMBER.finditer(rest)]
        phrases = [found[1].strip() for found in PHRASE.finditer(NUMBER.sub(" ", rest))]
        self.unnamed_values += [*texts, *numbers, *phrases]
        rest = re.sub(rf"\A\W*(?:(?:{_LINK})\b\W*)+", "", rest, flags=re.IGNORECASE)
        self.remainder = " ".join(rest.split()).strip(" .,;:!?")

    def _parse_json(self, text: str) -> str:
        """Read the JSON objects and lists of a sentence, and return the rest.

        The members of an object without a name are named values. A list of scalars without a name remains in the
        rest, too, because its values may be meant one by one.
        """
        rest, position = "", 0
        for start in islice((found.start() for found in JSON_START.finditer(text)), MAX_JSON):
            if start < position:
                continue
            try:
                value, end = JSON_DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            name = JSON_NAME.search(text, position, start)
            if name is not None:
                self._named[name[1]] = value
            elif isinstance(value, dict):
                self.json_object |= value
            else:
                self.unnamed_values.append(value)
                if not any(isinstance(each, dict | list) for each in value):
                    continue
            rest += f"{text[position : name.start() if name else start]} "
            position = end
        self._named |= self.json_object
        return rest + text[position:]

    def is_unsearched(self, name: str) -> bool:
        """Return whether the sentence contains the name, and was not yet searched for its value."""
        if not name or name in self._named or len(name) > len(self.sentence):
            return False
        folded = fold_case(name)
        return folded in self._folded or re.sub(r"[_-]", " ", folded) in self._folded

    def find_named(self, name: str) -> Any:
        """Return the value of this name in the sentence, or NO_VALUE."""
        if self.is_unsearched(name):
            self._named[name] = self._search_named(name)
        return self._named.get(name, NO_VALUE)

    def _search_named(self, name: str) -> Any:
        names = "|".join({re.escape(name), re.escape(re.sub(r"[_-]", " ", name))})
        value = rf"(?:{names})\s+(?:is\s+|of\s+|to\s+)?"
        plain = rf"\b{value}({_QUOTED}|{_NUMBER})(?!\w)"
        linked = rf"(?:\bwith|\band|,)\s+(?:the\s+)?{value}({_WORD})"
        for pattern in (plain, linked):
            if found := re.search(pattern, self.sentence, re.IGNORECASE):
                return _parse_literal(found[1])
        return NO_VALUE

    def find_mentioned(self, values: Iterable[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or None."""
        for value in values:
            if isinstance(value, str | int | float):
                text = str(value).lower()
                spoken = text.replace("_", " ").strip()
                if f" {text} " in self._words or f" {spoken} " in self._words:
                    return value
        return None

    @cached_property
    def _folded(self) -> str:
        return fold_case(self.sentence)

    @cached_property
    def _words(self) -> str:
        return f" {' '.join(WORD.findall(self.sentence.lower()))} "


def _parse_literal(text: str) -> Any:
    if QUOTED.fullmatch(text):
        return text[1:-1]
    if re.fullmatch(_NUMBER, text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not text.startswith("["):
        return text
    try:
        return JSON_DECODER.decode(text)
    except (ValueError, RecursionError):
        parts = (part.strip() for part in text.strip("[]").split(","))
        return [_parse_literal(part) for part in parts if part]
