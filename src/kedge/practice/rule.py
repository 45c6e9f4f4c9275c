"""What a rule of the practice model is: a phrase, and the function that answers it.

A rule's function gets what was heard and the match of its phrase. It gives what to say, or the
calls to make, or None when it has nothing to answer after all and the next rule shall try.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kedge.practice.values import PracticeRequest, ToolCallOutput

SLOW, VERY_SLOW, MAX_PACE = 0.05, 0.25, 10.0

POLITE_WORDS = (
    "please", "now", "then", "ok", "okay", "and", "so", "thanks", "thank you", "can you",
    "could you", "would you", "will you",
)  # fmt: skip
POLITE = re.compile(rf"(?:{'|'.join(POLITE_WORDS)})\b[,.!:]*\s+", re.IGNORECASE)
SLOWLY = re.compile(r"(very\s+)?slowly\b[\s,:.]*(?:and\s+)?", re.IGNORECASE)
SLOWLY_AT_END = re.compile(r"[\s,]+(very\s+)?slowly\s*([.!?]?)\s*\Z", re.IGNORECASE)
EVERY_SECONDS = re.compile(
    r"(?:one word\s+)?every\s+(\d{1,3}(?:\.\d{1,4})?)\s*(?:s|seconds?)\b[\s,:]*", re.IGNORECASE
)
THINK = re.compile(
    r"think\b(?:\s+(?:hard|carefully|twice|first))*(?:\s+about\b|\s+and\b)?[\s,:.]*(?:then\s+)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """How to answer: what is left of the sentence, how fast, and whether to think first."""

    sentence: str
    pace: float = 0.0
    think: bool = False


def _no_change(parsed: ParsedSentence, _: re.Match[str]) -> ParsedSentence:
    return replace(parsed)


def _set_slow(parsed: ParsedSentence, found: re.Match[str]) -> ParsedSentence:
    return replace(parsed, pace=VERY_SLOW if found[1] else SLOW)


def _set_pace(parsed: ParsedSentence, found: re.Match[str]) -> ParsedSentence:
    return replace(parsed, pace=min(float(found[1]), MAX_PACE))


def _set_think(parsed: ParsedSentence, _: re.Match[str]) -> ParsedSentence:
    return replace(parsed, think=True)


@dataclass(frozen=True, slots=True)
class Modifier:
    """Words of manner: how such a sentence begins or ends, the words, and what they change."""

    cues: tuple[str, ...]
    pattern: re.Pattern[str]
    apply: Callable[[ParsedSentence, "re.Match[str]"], ParsedSentence]
    at_end: bool = False

    def strip_from(self, parsed: ParsedSentence) -> ParsedSentence | None:
        """Take the words off the sentence; None where they are not there."""
        text = parsed.sentence
        start = max(0, len(text) - END_WINDOW)
        found = self.pattern.search(text, start) if self.at_end else self.pattern.match(text)
        if not found:
            return None
        rest = text[: found.start()] + (found[2] if self.at_end else "") + text[found.end() :]
        return self.apply(replace(parsed, sentence=rest.strip()), found)


MODIFIER_WINDOW = 20
END_WINDOW = 40
MODIFIERS = (
    Modifier(POLITE_WORDS, POLITE, _no_change),
    Modifier(("slowly", "very"), SLOWLY, _set_slow),
    Modifier(("slowly",), SLOWLY_AT_END, _set_slow, at_end=True),
    Modifier(("every", "one word"), EVERY_SECONDS, _set_pace),
    Modifier(("think",), THINK, _set_think),
)
MAX_MODIFIERS = 8


def parse_modifiers(message: str) -> ParsedSentence:
    """Read how a message wants to be answered."""
    manner = ParsedSentence(message.strip())
    for _ in range(MAX_MODIFIERS):
        peeled = _strip_modifier(manner)
        if peeled is None:
            break
        manner = peeled
    return manner


def _strip_modifier(parsed: ParsedSentence) -> ParsedSentence | None:
    head, end = (
        parsed.sentence[:MODIFIER_WINDOW].lower(),
        parsed.sentence[-MODIFIER_WINDOW:].lower(),
    )
    for peel in MODIFIERS:
        cued = peel.cues[0] in end if peel.at_end else head.startswith(peel.cues)
        if cued and (peeled := peel.strip_from(parsed)) is not None:
            return peeled
    return None


CUE_WINDOW = 20
SEARCH_WINDOW = (
    500  # a question stands at the end of a long message, not in the middle of a pasted text
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """The newest user message as a rule sees it."""

    request: PracticeRequest
    message: str  # as it was written
    sentence: str  # without politeness and without the words that ask for pace or thought
    pace: float = 0.0
    think: bool = False


@dataclass(frozen=True, slots=True)
class TextResult:
    """Something to say; ``value`` is the fact in it, which a JSON answer gives bare."""

    text: str
    value: Any = None
    is_refusal: bool = False


RuleHandler = Callable[[Utterance, "re.Match[str]"], TextResult | tuple[ToolCallOutput, ...] | None]


@dataclass(frozen=True, slots=True)
class PhraseRule:
    """One phrase: what it is about, how it is recognised, who answers it.

    Every form of the phrase opens with one of the cues or, where it may stand anywhere, holds one:
    a look for a word is fast, so most phrases are never searched for.
    """

    description: str
    cues: tuple[str, ...]
    pattern: re.Pattern[str]
    handler: RuleHandler
    at_start: bool

    def match(self, sentence: str, head: str, tail: str) -> re.Match[str] | None:
        """Match the phrase; ``head`` and ``tail`` are the ends of the sentence in lower case."""
        if self.at_start:
            return self.pattern.match(sentence) if head.startswith(self.cues) else None
        for cue in self.cues:
            if cue in tail:
                return self.pattern.search(sentence, max(0, len(sentence) - SEARCH_WINDOW))
        return None


def prefix_rule(
    description: str, cues: tuple[str, ...], pattern: str, handler: RuleHandler
) -> PhraseRule:
    """Make a rule for sentences that open with the phrase."""
    return PhraseRule(
        description, cues, re.compile(pattern, re.IGNORECASE | re.DOTALL), handler, at_start=True
    )


def search_rule(
    description: str, cues: tuple[str, ...], pattern: str, handler: RuleHandler
) -> PhraseRule:
    """Make a rule for sentences that hold the phrase."""
    return PhraseRule(
        description, cues, re.compile(pattern, re.IGNORECASE | re.DOTALL), handler, at_start=False
    )


def first_match(
    rules: Sequence[PhraseRule], utterance: Utterance
) -> tuple[TextResult | tuple[ToolCallOutput, ...], str] | None:
    """Ask the rules in turn; give the first answer, and what it is about."""
    sentence = utterance.sentence
    head, tail = sentence[:CUE_WINDOW].lower(), sentence[-SEARCH_WINDOW:].lower()
    for rule in rules:
        found = rule.match(sentence, head, tail)
        if found and (response := rule.handler(utterance, found)) is not None:
            return response, rule.description
    return None


def quote_text(text: str, max_length: int | None = None) -> str:
    """Put a text between quotation marks, shortened where it is longer than ``most``."""
    if max_length is not None and len(text) > max_length:
        text = text[:max_length].rstrip() + "…"
    return f'"{text}"'


def pluralize(count: int, noun: str) -> str:
    """Name a number of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
