"""Words around a request that change how it is answered: politeness, pace, thought.

They are peeled off one by one, so "Please think about 2 + 2, slowly" is the sum 2 + 2 with a
thought before it and at a slow pace.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

SLOW, VERY_SLOW, MOST_PACE = 0.05, 0.25, 10.0

POLITE_WORDS = (
    "please", "now", "then", "ok", "okay", "and", "so", "thanks", "thank you", "can you",
    "could you", "would you", "will you",
)  # fmt: skip
POLITE = re.compile(rf"(?:{'|'.join(POLITE_WORDS)})\b[,.!:]*\s+", re.IGNORECASE)
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


@dataclass(frozen=True, slots=True)
class Peel:
    """Words of manner: how such a sentence begins or ends, the words, and what they change."""

    cues: tuple[str, ...]
    words: re.Pattern[str]
    change: Callable[[Manner, "re.Match[str]"], Manner]
    at_end: bool = False

    def off(self, manner: Manner) -> Manner | None:
        """Take the words off the sentence; None where they are not there."""
        text = manner.sentence
        if self.at_end:
            found = self.words.search(text, max(0, len(text) - ENDING))
        else:
            found = self.words.match(text)
        if not found:
            return None
        rest = text[: found.start()] + (found[2] if self.at_end else "") + text[found.end() :]
        return self.change(replace(manner, sentence=rest.strip()), found)


HEAD = 20
ENDING = 40
PEELS = (
    Peel(POLITE_WORDS, POLITE, _same),
    Peel(("slowly", "very"), SLOWLY, _slow),
    Peel(("slowly",), SLOWLY_AT_END, _slow, at_end=True),
    Peel(("every", "one word"), EVERY, _every),
    Peel(("think",), THINK, _think),
)
MOST_PEELS = 8


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
    head, end = manner.sentence[:HEAD].lower(), manner.sentence[-HEAD:].lower()
    for peel in PEELS:
        cued = peel.cues[0] in end if peel.at_end else head.startswith(peel.cues)
        if cued and (peeled := peel.off(manner)) is not None:
            return peeled
    return None
