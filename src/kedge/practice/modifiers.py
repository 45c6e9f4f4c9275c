"""Words around a request that change how it is answered: politeness, pace, thought.

They are peeled off one by one, so "Please think about 2 + 2, slowly" is the sum 2 + 2 with a
thought before it and at a slow pace.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

SLOW, VERY_SLOW, MOST_PACE = 0.05, 0.25, 10.0

POLITE = re.compile(
    r"(?:please|now|then|ok|okay|and|so|thanks|thank you|can you|could you|would you|will you)\b"
    r"[,.!:]*\s+",
    re.IGNORECASE,
)
SLOWLY = re.compile(r"(very\s+)?slowly\b[\s,:.]*(?:and\s+)?", re.IGNORECASE)
SLOWLY_AT_END = re.compile(r"[\s,]+(very\s+)?slowly\s*([.!?]?)\s*\Z", re.IGNORECASE)
EVERY = re.compile(
    r"(?:one word\s+)?every\s+(\d{1,3}(?:\.\d{1,4})?)\s*(?:s|seconds?)\b[\s,:]*", re.IGNORECASE
)
THINK = re.compile(
    r"think\b(?:\s+(?:hard|carefully|twice|first))*(?:\s+about\b|\s+and\b)?[\s,:.]*(?:then\s+)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Manner:
    """How to answer: what is left of the sentence, how fast, and whether to think first."""

    sentence: str
    pace: float = 0.0
    think: bool = False


def _same(manner: Manner, _: re.Match[str]) -> Manner:
    return replace(manner)


def _slow(manner: Manner, found: re.Match[str]) -> Manner:
    return replace(manner, pace=VERY_SLOW if found[1] else SLOW)


def _every(manner: Manner, found: re.Match[str]) -> Manner:
    return replace(manner, pace=min(float(found[1]), MOST_PACE))


def _think(manner: Manner, _: re.Match[str]) -> Manner:
    return replace(manner, think=True)


Change = Callable[[Manner, "re.Match[str]"], Manner]
PEELS: tuple[tuple[re.Pattern[str], Change], ...] = (
    (POLITE, _same),
    (SLOWLY, _slow),
    (SLOWLY_AT_END, _slow),
    (EVERY, _every),
    (THINK, _think),
)
MOST_PEELS = 8
ENDING = 40


def manner_of(message: str) -> Manner:
    """Read how a message wants to be answered."""
    manner = Manner(message.strip())
    for _ in range(MOST_PEELS):
        peeled = _peeled(manner)
        if peeled is None:
            break
        manner = peeled
    return manner


def _peeled(manner: Manner) -> Manner | None:
    """Take one word of manner off the sentence; None where there is none."""
    text = manner.sentence
    for pattern, change in PEELS:
        at_end = pattern is SLOWLY_AT_END
        found = pattern.search(text, max(0, len(text) - ENDING)) if at_end else pattern.match(text)
        if found:
            rest = (
                text[: found.start()] + (found[2] if at_end else "") + text[found.end() :]
            ).strip()
            return change(replace(manner, sentence=rest), found)
    return None
