"""Rules that echo a text, once or several times, write at length, count, or refuse."""

import re
from itertools import cycle, islice

from kedge.practice.rule import TextResult, Utterance, prefix_rule

MAX_TIMES = 1_000
MAX_WORDS = 100_000
MAX_REPEAT_LENGTH = 2_000
TIMES_PATTERN = re.compile(
    r"\A(.*?)[\s,]+(?:(\d{1,6}) times|(twice)|(thrice|three times))\W*\Z", re.DOTALL | re.IGNORECASE
)
QUOTE_PAIRS = {'"': '"', "“": "”", "'": "'"}

FILLER_TEXT = (
    "The kedge goes out, the line comes tight, and the ship moves a little way ahead again."
)


def echo(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Repeat the rest of the sentence, as often as requested."""
    text = match["text"].strip()
    if not text:
        return None
    if len(text) < MAX_REPEAT_LENGTH and (times := TIMES_PATTERN.match(text)):
        number = int(times[2]) if times[2] else 2 if times[3] else 3
        once = strip_quotes(times[1].rstrip(":, "))
        return TextResult(" ".join([once] * min(number, MAX_TIMES)), once)
    return TextResult(strip_quotes(text), strip_quotes(text))


def strip_quotes(text: str) -> str:
    """Remove a pair of quotation marks around the text."""
    for end in ("", ".", "!", "?"):
        body = text.removesuffix(end)
        if len(body) > 1 and QUOTE_PAIRS.get(body[0]) == body[-1] and body.count(body[-1]) <= 2:
            return body[1:-1]
    return text


def write_words(_: Utterance, match: re.Match[str]) -> TextResult:
    """Write the requested number of words."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(islice(cycle(FILLER_TEXT.split()), number)))


def count_to(_: Utterance, match: re.Match[str]) -> TextResult:
    """Count from one to a number."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(map(str, range(1, number + 1))), list(range(1, number + 1)))


def refuse(_: Utterance, match: re.Match[str]) -> TextResult:
    """Refuse a request, and name it in the refusal."""
    what = match["what"].strip().rstrip(".!?")
    return TextResult(f"I will not {what}." if what else "I will not do that.", is_refusal=True)


LITERAL_RULES = (
    prefix_rule("say something", r"(?:say|repeat|echo|repeat after me)\s*:\s*(?P<text>.+)", echo),
    prefix_rule("say something", r"(?:say|repeat|echo)\s+(?P<text>[\"“'].+)", echo),
    prefix_rule("refuse", r"refuse\b(?:\s+to\b)?[\s:,]*(?P<what>.*)", refuse),
    prefix_rule("write at length", r"write\s+(\d{1,9})\s+words?\b", write_words),
    prefix_rule("count to a number", r"count\s+(?:from 1\s+)?to\s+(\d{1,9})\b", count_to),
)
LOOSE_RULES = (prefix_rule("say something", r"(?:say|repeat|echo)\s+(?P<text>.+)", echo),)
