"""Phrase rules of the practice model: a pattern, and the handler that answers it.

A handler gets the utterance and the match of its pattern. It returns a text, the calls to make, or
None if it has no answer and the next rule applies.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kedge.practice.context import PracticeRequest, ToolCallOutput, last_user_text, message_texts
from kedge.practice.schema_sample import SampleBudget
from kedge.practice.sentence_values import fold_case

SLOW, VERY_SLOW, MAX_PACE = 0.05, 0.25, 10.0
FLAGS = re.IGNORECASE | re.DOTALL

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
SEARCH_WINDOW = 500
"""A question is at the end of a long message, not in the middle of a pasted text."""
SEARCH_WORDS = ("what", "quote", "repeat", "how", "count", "do", "did")
"""The first words of all phrases that are searched. A sentence without them is not searched ten times."""


def _read_slow(found: "re.Match[str]") -> dict[str, Any]:
    return {"pace": VERY_SLOW if found[1] else SLOW}


MODIFIERS: tuple[tuple[re.Pattern[str], Callable[["re.Match[str]"], dict[str, Any]]], ...] = (
    (POLITE, lambda _: {}),
    (SLOWLY, _read_slow),
    (EVERY_SECONDS, lambda found: {"pace": min(float(found[1]), MAX_PACE)}),
    (THINK, lambda _: {"think": True}),
    (INVALID, lambda found: {"invalid": fold_case(found[1])}),
)
"""Patterns of text before a sentence, and the fields of ``Utterance`` that they set."""
ANY_MODIFIER = re.compile(
    "|".join(f"(?:{pattern.pattern})" for pattern, _ in MODIFIERS), re.IGNORECASE
)
"""A pattern that matches if one of them does, which is rare."""


def parse_utterance(request: PracticeRequest) -> "Utterance":
    """Parse the newest user message, and the words in it that determine how it is answered."""
    message = last_user_text(request.items)
    is_corrected = message.startswith(CORRECTION)
    if is_corrected:  # the question is the one before
        texts = message_texts(request.items, "user")
        message = next((text for text in texts[::-1] if not text.startswith(CORRECTION)), message)
    sentence, fields = message.strip(), dict[str, Any](is_corrected=is_corrected)
    for _ in range(MAX_MODIFIERS):
        for pattern, read in MODIFIERS if ANY_MODIFIER.match(sentence) else ():
            if found := pattern.match(sentence):
                sentence = sentence[found.end() :].strip()
                fields |= read(found)
                break
        else:
            is_slow = "slowly" in fold_case(sentence[-END_WINDOW:])
            found = is_slow and SLOWLY_AT_END.search(sentence, max(0, len(sentence) - END_WINDOW))
            if not found:
                break
            sentence = (sentence[: found.start()] + found[2]).strip()
            fields |= _read_slow(found)
    return Utterance(request, message, sentence, SampleBudget(), **fields)


class Utterance(NamedTuple):
    """The newest user message, as passed to the rules."""

    request: PracticeRequest
    message: str  # as it was written
    sentence: str  # without polite words and without those that set the pace or ask for reasoning
    budget: SampleBudget  # of all values that the answer has
    pace: float = 0.0
    think: bool = False
    invalid: str = ""  # "first" or "always": which answers do not match their schema
    is_corrected: bool = False  # whether the newest message requests the answer again

    @property
    def wants_invalid(self) -> bool:
        """Whether the answer must not match its schema."""
        return self.invalid == "always" or (self.invalid == "first" and not self.is_corrected)


@dataclass(frozen=True, slots=True)
class TextResult:
    """A text answer; ``value`` is the fact in it, which a JSON answer contains instead of the text."""

    text: str
    value: Any = None
    is_refusal: bool = False


RuleHandler = Callable[[Utterance, "re.Match[str]"], TextResult | tuple[ToolCallOutput, ...] | None]


@dataclass(frozen=True, slots=True)
class PhraseRule:
    """One phrase: its topic, its pattern, its handler, and whether it may be inside a sentence."""

    description: str
    pattern: re.Pattern[str]
    handler: RuleHandler
    is_searched: bool = False


def prefix_rule(description: str, pattern: str, handler: RuleHandler) -> PhraseRule:
    """Return a rule for sentences that start with the phrase."""
    return PhraseRule(description, re.compile(pattern, FLAGS), handler)


def search_rule(description: str, pattern: str, handler: RuleHandler) -> PhraseRule:
    """Return a rule for sentences that contain the phrase in their last ``SEARCH_WINDOW`` characters.

    The phrase starts with one of the words of ``SEARCH_WORDS``.
    """
    return PhraseRule(description, re.compile(pattern, FLAGS), handler, is_searched=True)


def first_match(
    rules: Sequence[PhraseRule], utterance: Utterance
) -> tuple[TextResult | tuple[ToolCallOutput, ...], str] | None:
    """Try the rules in order, and return the first answer and the topic of its rule."""
    sentence = utterance.sentence
    start = max(0, len(sentence) - SEARCH_WINDOW)
    end = fold_case(sentence[start:])
    has_search_word = any(word in end for word in SEARCH_WORDS)
    for rule in rules:
        if not rule.is_searched:
            found = rule.pattern.match(sentence)
        else:
            found = has_search_word and rule.pattern.search(sentence, start)
        if found and (response := rule.handler(utterance, found)) is not None:
            return response, rule.description
    return None


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in plain digits, because programs parse the number."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quote_text(text: str, max_length: int | None = None) -> str:
    """Quote a text, truncated to ``max_length`` characters unless that is None."""
    if max_length is not None and len(text) > max_length:
        text = text[:max_length].rstrip() + "…"
    return f'"{text}"'
