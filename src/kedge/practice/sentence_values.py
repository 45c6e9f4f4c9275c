"""Extract values from a sentence, for the arguments of a tool or the members of a JSON answer.

"call add with a=2 and b=3" names its values; "get_weather in Paris" only mentions one. A named value is
used for the member of that name, a mentioned one for the first member that it fits, each once.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

MAX_SENTENCE_LENGTH = 2_000
_NUMBER = r"[-+]?\d{1,30}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,2})?"
_QUOTED = r"\"[^\"]*\"|“[^”]*”|(?<!\w)'[^']*'(?!\w)"
NAMED_VALUE = re.compile(
    rf"\b([A-Za-z_][\w.-]*)\s*[=:]\s*({_QUOTED}|\[[^\]]*\]|[^\s,;][^,;]*?)"
    r"(?=\s+and\b|\s*[,;]|\s+[A-Za-z_][\w.-]*\s*[=:]|[.?!]?\s*\Z)"
)
QUOTED = re.compile(_QUOTED)
NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}(?![\w%]|\.\d)")
_WORD = r"[^\s,;?!]*[^\s,;?!.]"  # a dot may be inside, not at the end
_LINK = r"in|for|of|to|about|at|on|from|with|by|named|called|and"
PHRASE = re.compile(
    rf"\b(?:{_LINK})\s+((?:(?!(?:{_LINK})\b){_WORD})(?:\s+(?!(?:{_LINK})\b){_WORD})*)",
    re.IGNORECASE,
)
WORD = re.compile(r"[\w.-]*\w")
ARTICLE = re.compile(r"\A(?:the|a|an|my|your)\s+", re.IGNORECASE)
BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


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
        self.named_values: dict[str, Any] = dict(extra or {})
        rest = self._parse_object(self.sentence)
        rest = self._parse_named(rest)
        texts = [found[0][1:-1] for found in QUOTED.finditer(rest)]
        rest = QUOTED.sub(" ", rest)
        numbers = [parse_number(found[0]) for found in NUMBER.finditer(rest)]
        phrases = _find_phrases(NUMBER.sub(" ", rest))
        self.unnamed_values: list[Any] = [*facts, *texts, *numbers, *phrases]
        self.remainder = _strip_links(rest)

    def _parse_object(self, text: str) -> str:
        if (start := text.find("{")) < 0:
            return text
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            return text
        self.named_values |= cast("dict[str, Any]", value)
        return f"{text[:start]} {text[end:]}"

    def _parse_named(self, text: str) -> str:
        for found in NAMED_VALUE.finditer(text):
            self.named_values.setdefault(found[1], _parse_literal(found[2].strip()))
        return NAMED_VALUE.sub(" ", text)

    def find_named(self, name: str) -> Any:
        """Return the value of this name in the sentence, or None."""
        if name in self.named_values:
            return self.named_values[name]
        if not name:
            return None
        name_pattern = "|".join({re.escape(name), re.escape(re.sub(r"[_-]", " ", name))})
        plain = rf"\b(?:{name_pattern})\s+(?:is\s+|of\s+|to\s+)?({_QUOTED}|{_NUMBER})(?!\w)"
        linked = (
            rf"(?:\bwith|\band|,)\s+(?:the\s+)?(?:{name_pattern})\s+(?:is\s+|of\s+|to\s+)?({_WORD})"
        )
        for pattern in (plain, linked):
            if found := re.search(pattern, self.sentence, re.IGNORECASE):
                return _parse_literal(found[1])
        return None

    def pop_unnamed(self, fits: Callable[[Any], bool]) -> Any:
        """Remove and return the first value without a name that fits; None if there is none."""
        for i, value in enumerate(self.unnamed_values):
            if fits(value):
                return self.unnamed_values.pop(i)
        return None

    def find_mentioned(self, values: Iterable[Any]) -> Any:
        """Return the first of these values that the sentence contains as a word, or None."""
        words = f" {' '.join(WORD.findall(self.sentence.lower()))} "
        for value in values:
            spoken = str(value).lower().replace("_", " ").strip()
            if value is not None and (f" {str(value).lower()} " in words or f" {spoken} " in words):
                return value
        return None


def parse_number(text: str) -> float:
    """Parse a number; the result is an integer if it is written as one."""
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _parse_literal(text: str) -> Any:
    if QUOTED.fullmatch(text):
        return text[1:-1]
    if re.fullmatch(_NUMBER, text):
        return parse_number(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return [
                _parse_literal(part.strip()) for part in text.strip("[]").split(",") if part.strip()
            ]
    return text


def _find_phrases(text: str) -> list[str]:
    phrases = (ARTICLE.sub("", match[1]).strip() for match in PHRASE.finditer(text))
    return [phrase for phrase in phrases if phrase]


def _strip_links(text: str) -> str:
    """Remove leading link words and punctuation from the rest of a sentence."""
    text = re.sub(rf"\A\W*(?:(?:{_LINK})\b\W*)+", "", text, flags=re.IGNORECASE)
    return " ".join(text.split()).strip(" .,;:!?")
