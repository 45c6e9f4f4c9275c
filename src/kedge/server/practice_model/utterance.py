"""The sentence that the practice model answers: the newest user message without its modifiers.

Modifiers are polite words, and words that set the pace of the answer, ask for reasoning or for an invalid answer.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kedge.server.practice_model.items import last_user_text, message_texts
from kedge.server.practice_model.request import PracticeRequest
from kedge.server.practice_model.schema_sample import SampleBudget
from kedge.server.practice_model.text import fold_case

SLOW = 0.05
VERY_SLOW = 0.25
MAX_PACE = 10.0

POLITE = re.compile(
    r"(?:please|ok|and|now|then|so|(?:can|could|would) you)\b[,.!:]*\s+", re.IGNORECASE
)
SLOWLY = re.compile(r"(very\s+)?slowly\b[\s,:.]*(?:and\s+)?", re.IGNORECASE)
SLOWLY_AT_END = re.compile(r"[\s,]+(very\s+)?slowly\s*([.!?]?)\s*\Z", re.IGNORECASE)
EVERY_SECONDS = re.compile(
    r"every\s+(\d{1,3}(?:\.\d{1,4})?)\s*(?:s|seconds?)\b[\s,:]*", re.IGNORECASE
)
THINK = re.compile(r"think\b(?:\s+about\b|\s+and\b)?[\s,:.]*", re.IGNORECASE)
INVALID = re.compile(r"(first|always)\s+invalid\b[\s,:.]*", re.IGNORECASE)
CORRECTION = "That does not have the form asked for"
"""The start of a message that requests an answer again, because it did not match its schema."""

MAX_MODIFIERS = 8
END_WINDOW = 40


def _read_pace(match: "re.Match[str]") -> dict[str, Any]:
    return {"pace": VERY_SLOW if match[1] else SLOW}


MODIFIERS: tuple[tuple[re.Pattern[str], Callable[["re.Match[str]"], dict[str, Any]]], ...] = (
    (POLITE, lambda _: {}),
    (SLOWLY, _read_pace),
    (EVERY_SECONDS, lambda match: {"pace": min(float(match[1]), MAX_PACE)}),
    (THINK, lambda _: {"think": True}),
    (INVALID, lambda match: {"invalid": fold_case(match[1])}),
)
"""Patterns of text before a sentence, and the fields of ``Utterance`` that they set."""
ANY_MODIFIER = re.compile(
    "|".join(f"(?:{pattern.pattern})" for pattern, _ in MODIFIERS), re.IGNORECASE
)
"""A pattern that matches if one of the modifiers does, which is rare."""


class Utterance(NamedTuple):
    """The newest user message, as passed to the rules."""

    request: PracticeRequest
    message: str  # as it was written
    sentence: str  # without modifiers
    budget: SampleBudget  # of all values that the answer has
    pace: float = 0.0
    think: bool = False
    invalid: str = ""  # "first" or "always": which answers do not match their schema
    is_corrected: bool = False  # whether the newest message requests the answer again

    @property
    def wants_invalid(self) -> bool:
        """Whether the answer must not match its schema."""
        return self.invalid == "always" or (self.invalid == "first" and not self.is_corrected)


def parse_utterance(request: PracticeRequest) -> Utterance:
    """Parse the newest user message, and the words in it that determine how it is answered."""
    message = last_user_text(request.items)
    is_corrected = message.startswith(CORRECTION)
    if is_corrected:
        message = _find_question(request) or message

    sentence = message.strip()
    fields: dict[str, Any] = {}
    for _ in range(MAX_MODIFIERS):
        modifier = _split_first_modifier(sentence) or _split_pace_at_end(sentence)
        if modifier is None:
            break
        sentence, modifier_fields = modifier
        fields |= modifier_fields
    return Utterance(
        request, message, sentence, SampleBudget(), is_corrected=is_corrected, **fields
    )


def _find_question(request: PracticeRequest) -> str | None:
    """Return the newest user message that is not a correction."""
    for text in reversed(message_texts(request.items, "user")):
        if not text.startswith(CORRECTION):
            return text
    return None


def _split_first_modifier(sentence: str) -> tuple[str, dict[str, Any]] | None:
    """Return the sentence without the modifier at its start, and the fields that it sets."""
    if not ANY_MODIFIER.match(sentence):
        return None
    for pattern, read_fields in MODIFIERS:
        match = pattern.match(sentence)
        if match is not None:
            return sentence[match.end() :].strip(), read_fields(match)
    return None


def _split_pace_at_end(sentence: str) -> tuple[str, dict[str, Any]] | None:
    """Return the sentence without "slowly" at its end, and the pace."""
    if "slowly" not in fold_case(sentence[-END_WINDOW:]):
        return None
    match = SLOWLY_AT_END.search(sentence, max(0, len(sentence) - END_WINDOW))
    if match is None:
        return None
    return (sentence[: match.start()] + match[2]).strip(), _read_pace(match)
