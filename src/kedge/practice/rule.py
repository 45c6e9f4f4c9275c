"""What a rule of the practice model is: a phrase, and the function that answers it.

A rule's function gets what was heard and the match of its phrase. It gives what to say, or the
calls to make, or None when it has nothing to answer after all and the next rule shall try.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kedge.practice.values import Ask, Call

HEAD = 20
TAIL = 500  # a question stands at the end of a long message, not in the middle of a pasted text


@dataclass(frozen=True, slots=True)
class Heard:
    """The newest user message as a rule sees it."""

    ask: Ask
    message: str  # as it was written
    sentence: str  # without politeness and without the words that ask for pace or thought
    pace: float = 0.0
    think: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """Something to say; ``value`` is the fact in it, which a JSON answer gives bare."""

    text: str
    value: Any = None
    refused: bool = False


Speak = Callable[[Heard, "re.Match[str]"], Said | tuple[Call, ...] | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One phrase: what it is about, how it is recognised, who answers it.

    Every form of the phrase opens with one of the cues or, where it may stand anywhere, holds one:
    a look for a word is fast, so most phrases are never searched for.
    """

    about: str
    cues: tuple[str, ...]
    phrase: re.Pattern[str]
    speak: Speak
    opens: bool

    def found_in(self, sentence: str, head: str, tail: str) -> re.Match[str] | None:
        """Match the phrase; ``head`` and ``tail`` are the ends of the sentence in lower case."""
        if self.opens:
            return self.phrase.match(sentence) if head.startswith(self.cues) else None
        for cue in self.cues:
            if cue in tail:
                return self.phrase.search(sentence, max(0, len(sentence) - TAIL))
        return None


def opening(about: str, cues: tuple[str, ...], phrase: str, speak: Speak) -> Rule:
    """Make a rule for sentences that open with the phrase."""
    return Rule(about, cues, re.compile(phrase, re.IGNORECASE | re.DOTALL), speak, opens=True)


def anywhere(about: str, cues: tuple[str, ...], phrase: str, speak: Speak) -> Rule:
    """Make a rule for sentences that hold the phrase."""
    return Rule(about, cues, re.compile(phrase, re.IGNORECASE | re.DOTALL), speak, opens=False)


def first_match(rules: Sequence[Rule], heard: Heard) -> tuple[Said | tuple[Call, ...], str] | None:
    """Ask the rules in turn; give the first answer, and what it is about."""
    sentence = heard.sentence
    head, tail = sentence[:HEAD].lower(), sentence[-TAIL:].lower()
    for rule in rules:
        found = rule.found_in(sentence, head, tail)
        if found and (response := rule.speak(heard, found)) is not None:
            return response, rule.about
    return None


def quoted(text: str, most: int | None = None) -> str:
    """Put a text between quotation marks, shortened where it is longer than ``most``."""
    if most is not None and len(text) > most:
        text = text[:most].rstrip() + "…"
    return f'"{text}"'


def plural(count: int, noun: str) -> str:
    """Name a number of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
