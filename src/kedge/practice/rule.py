"""What a rule of the practice model is: a phrase, and the function that answers it.

A rule's function gets what was heard and the match of its phrase. It gives what to say, or the
calls to make, or None when it has nothing to answer after all and the next rule shall try.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kedge.practice.values import Ask, Call

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
    """One phrase: what it is about, how it is recognised, who answers it."""

    about: str
    phrase: re.Pattern[str]
    speak: Speak
    cues: tuple[str, ...] | None = None

    def found_in(self, sentence: str) -> re.Match[str] | None:
        """Match the phrase at the start of a sentence or, where it has cues, near the end of it.

        A search is slow beside a look for a word, so it begins only where one of the cues is.
        """
        if self.cues is None:
            return self.phrase.match(sentence)
        tail = sentence[-TAIL:].lower()
        for cue in self.cues:
            if cue in tail:
                return self.phrase.search(sentence, max(0, len(sentence) - TAIL))
        return None


def opening(about: str, phrase: str, speak: Speak) -> Rule:
    """Make a rule for sentences that open with the phrase."""
    return Rule(about, re.compile(phrase, re.IGNORECASE | re.DOTALL), speak)


def anywhere(about: str, cues: tuple[str, ...], phrase: str, speak: Speak) -> Rule:
    """Make a rule for sentences that hold the phrase; every form of it has one of the cues."""
    return Rule(about, re.compile(phrase, re.IGNORECASE | re.DOTALL), speak, cues)


def quoted(text: str, most: int | None = None) -> str:
    """Put a text between quotation marks, shortened where it is longer than ``most``."""
    if most is not None and len(text) > most:
        text = text[:most].rstrip() + "…"
    return f'"{text}"'


def plural(count: int, noun: str) -> str:
    """Name a number of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
