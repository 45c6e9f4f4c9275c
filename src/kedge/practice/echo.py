"""Saying what one is told to say: once, several times, at length, or not at all."""

import re
from itertools import cycle, islice

from kedge.practice.rule import Heard, Said, opening

MOST_TIMES = 1_000
MOST_WORDS = 100_000
MOST_REPEATED = 2_000
TIMES = re.compile(
    r"\A(.*?)[\s,]+(?:(\d{1,6}) times|(twice)|(thrice|three times))\W*\Z", re.DOTALL | re.IGNORECASE
)
MARKS = {'"': '"', "“": "”", "'": "'"}

STORY = "The kedge goes out, the line comes tight, and the ship moves a little way ahead again."


def echo(_: Heard, match: re.Match[str]) -> Said | None:
    """Say the rest of the sentence, as often as asked."""
    text = match["text"].strip()
    if not text:
        return None
    if len(text) < MOST_REPEATED and (times := TIMES.match(text)):
        number = int(times[2]) if times[2] else 2 if times[3] else 3
        once = unquoted(times[1].rstrip(":, "))
        return Said(" ".join([once] * min(number, MOST_TIMES)), once)
    return Said(unquoted(text), unquoted(text))


def unquoted(text: str) -> str:
    """Take the quotation marks off a text that is wholly inside a pair of them."""
    for end in ("", ".", "!", "?"):
        body = text.removesuffix(end)
        if len(body) > 1 and MARKS.get(body[0]) == body[-1] and body.count(body[-1]) <= 2:
            return body[1:-1]
    return text


def words(_: Heard, match: re.Match[str]) -> Said:
    """Write so many words."""
    number = min(int(match[1]), MOST_WORDS)
    return Said(" ".join(islice(cycle(STORY.split()), number)))


def count_to(_: Heard, match: re.Match[str]) -> Said:
    """Count from one to a number."""
    number = min(int(match[1]), MOST_WORDS)
    return Said(" ".join(map(str, range(1, number + 1))), list(range(1, number + 1)))


def refuse(_: Heard, match: re.Match[str]) -> Said:
    """Refuse, and say what was refused."""
    what = match["what"].strip().rstrip(".!?")
    return Said(f"I will not {what}." if what else "I will not do that.", refused=True)


SAY = ("say", "repeat", "echo")
LITERAL = (
    opening("say something", SAY, r"(?:say|repeat|echo|repeat after me)\s*:\s*(?P<text>.+)", echo),
    opening("say something", SAY, r"(?:say|repeat|echo)\s+(?P<text>[\"“'].+)", echo),
    opening("refuse", ("refuse",), r"refuse\b(?:\s+to\b)?[\s:,]*(?P<what>.*)", refuse),
    opening("write at length", ("write",), r"write\s+(\d{1,9})\s+words?\b", words),
    opening("count to a number", ("count",), r"count\s+(?:from 1\s+)?to\s+(\d{1,9})\b", count_to),
)
LOOSE = (opening("say something", SAY, r"(?:say|repeat|echo)\s+(?P<text>.+)", echo),)
