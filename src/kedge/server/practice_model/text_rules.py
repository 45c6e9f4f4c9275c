"""Rules for texts: echo one, write at length, count, refuse; quote, count and search messages, recall facts; do sums.

"Earlier" never includes the question itself, so a server that has lost the context is detected
by the first question about the past.
"""

import re
from itertools import cycle, islice
from typing import NamedTuple

from kedge.server.practice_model.arithmetic import MAX_LENGTH, evaluate, format_number
from kedge.server.practice_model.items import (
    extract_text,
    is_message,
    is_output,
    items_after_last_user,
    message_texts,
    tool_results,
)
from kedge.server.practice_model.rules import RuleList, TextResult
from kedge.server.practice_model.text import fold_case, format_count, quote_text
from kedge.server.practice_model.utterance import Utterance

MAX_TIMES = 1_000
MAX_WORDS = 100_000
MAX_REPEAT_LENGTH = 2_000
TIMES_PATTERN = re.compile(
    r"\A(?P<text>.*?)[\s,]+"
    r"(?:(?P<number>\d{1,6}) times|(?P<twice>twice)|(?P<thrice>thrice|three times))\W*\Z",
    re.DOTALL | re.IGNORECASE,
)
QUOTE_PAIRS = {'"': '"', "“": "”", "'": "'"}

LITERAL_RULES = RuleList()
OTHER_RULES = RuleList()

FILLER_TEXT = (
    "The kedge goes out, the line comes tight, and the ship moves a little way ahead again."
)


@LITERAL_RULES.prefix("say something", r"(?:say|repeat|echo)\s+(?P<text>[\"“'].+)")
@LITERAL_RULES.prefix("say something", r"(?:say|repeat|echo|repeat after me)\s*:\s*(?P<text>.+)")
def echo(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Repeat the rest of the sentence, as often as requested."""
    text = match["text"].strip()
    if not text:
        return None
    repetition = None
    if len(text) < MAX_REPEAT_LENGTH:
        repetition = TIMES_PATTERN.match(text)
    if repetition is None:
        plain = strip_quotes(text)
        return TextResult(plain, plain)
    once = strip_quotes(repetition["text"].rstrip(":, "))
    return TextResult(" ".join([once] * _read_times(repetition)), once)


def _read_times(repetition: re.Match[str]) -> int:
    if repetition["twice"]:
        return 2
    if repetition["thrice"]:
        return 3
    return min(int(repetition["number"]), MAX_TIMES)


def strip_quotes(text: str) -> str:
    """Remove a pair of quotation marks around the text."""
    for end in ("", ".", "!", "?"):
        body = text.removesuffix(end)
        if len(body) > 1 and QUOTE_PAIRS.get(body[0]) == body[-1] and body.count(body[-1]) <= 2:
            return body[1:-1]
    return text


@LITERAL_RULES.prefix("write at length", r"write\s+(\d{1,9})\s+words?\b")
def write_words(_: Utterance, match: re.Match[str]) -> TextResult:
    """Write the requested number of words."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(islice(cycle(FILLER_TEXT.split()), number)))


@LITERAL_RULES.prefix("count to a number", r"count\s+(?:from 1\s+)?to\s+(\d{1,9})\b")
def count_to(_: Utterance, match: re.Match[str]) -> TextResult:
    """Count from one to a number."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(map(str, range(1, number + 1))), list(range(1, number + 1)))


@LITERAL_RULES.prefix("refuse", r"refuse\b(?:\s+to\b)?[\s:,]*(?P<what>.*)")
def refuse(_: Utterance, match: re.Match[str]) -> TextResult:
    """Refuse a request, and name it in the refusal."""
    task = match["what"].strip().rstrip(".!?") or "do that"
    return TextResult(f"I will not {task}.", is_refusal=True)


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth",
            "tenth")  # fmt: skip
ORDINAL_PATTERN = rf"{'|'.join(ORDINALS)}|\d{{1,6}}(?:st|nd|rd|th)|last|previous|latest"
SPEECH_VERBS = (
    r"(?:say|said|write|written|ask|asked|answer|answered|reply|replied|tell you|told you)"
)


class Speaker(NamedTuple):
    """The messages that a pronoun refers to: their roles, the start of a quote, and the suffix of a count."""

    roles: tuple[str, ...]
    subject: str
    owner: str


USER = Speaker(("user",), "You", " of yours")
MODEL = Speaker(("assistant",), "I", " of mine")
ANY_SPEAKER = Speaker(("user", "assistant"), "", "")
SPEAKERS = {"i": USER, "my": USER, "you": MODEL, "your": MODEL}
FACT_PATTERN = re.compile(r"\bmy ([\w' -]{1,60}?) (?:is|are) ([^.!?\n]{1,200})", re.IGNORECASE)


def earlier_texts(utterance: Utterance, *roles: str) -> list[str]:
    """Return the texts of the messages of these roles, without the newest user message."""
    items = utterance.request.items
    newer = items_after_last_user(items)
    older = items[: max(len(items) - len(newer) - 1, 0)]
    return message_texts([*older, *newer], *roles)


def _find_speaker(pronoun: str | None) -> Speaker:
    return SPEAKERS.get(fold_case(pronoun or ""), ANY_SPEAKER)


@OTHER_RULES.prefix(
    "list the messages",
    r"(?:repeat|list) (?:everything|all|all the messages|the messages)"
    r"(?: (?:that )?(?P<whose>i|you|we)(?: have)? said)?(?: so far)?\W*\Z",
)
@OTHER_RULES.search(
    "list the messages",
    rf"\bwhat (?:did|have) (?P<whose>i|you|we) {SPEECH_VERBS} (?:so far|until now|in all|altogether)",
)
def list_messages(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """List the messages so far, with numbers."""
    texts = earlier_texts(utterance, *_find_speaker(match["whose"]).roles)
    if not texts:
        return TextResult("Nothing has been said before this message.", [])
    return TextResult("\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1)), texts)


@OTHER_RULES.search(
    "quote a message",
    r"\b(?:what (?:was|is)|quote|repeat) (?P<whose>my|your|the) "
    rf"(?P<which>{ORDINAL_PATTERN}) (?:message|question|answer|sentence|thing)\b",
)
@OTHER_RULES.search(
    "quote a message",
    rf"\bwhat (?:did|have) (?P<whose>i|you) (?:just )?{SPEECH_VERBS}\b(?P<which>[^?.!]*)",
)
def quote_message(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """Quote one message: the first, the last, the n-th, of the user or of the model."""
    speaker = _find_speaker(match["whose"])
    texts = earlier_texts(utterance, *speaker.roles)
    ordinal = re.search(rf"\b({ORDINAL_PATTERN})\b", match["which"] or "", re.IGNORECASE)
    which = "last"
    if ordinal:
        which = fold_case(ordinal[1])

    position = _find_index(which, len(texts))
    if not 0 <= position < len(texts):
        number = "no message"
        if texts:
            number = f"only {format_count(len(texts), 'message')}"
        return TextResult(f"I cannot see it: there is {number}{speaker.owner} before this one.")
    text = texts[position]
    if speaker.subject:
        return TextResult(f"{speaker.subject} said {which}: {quote_text(text)}", text)
    return TextResult(f"The {which} message is: {quote_text(text)}", text)


def _find_index(which: str, count: int) -> int:
    if which in ORDINALS:
        return ORDINALS.index(which)
    if which[0].isdigit():
        return int(which[:-2]) - 1
    return count - 1


# The counted groups of messages, in the order of the report.
COUNTED_ROLES = (
    ("of yours", ("user",)),
    ("of mine", ("assistant",)),
    ("of the system", ("system", "developer")),
)


@OTHER_RULES.search("count the messages", r"\b(?:how many|count (?:the|my|our|all)) messages\b")
def count_messages(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Count the messages and, if there are any, the tool results and reasoning items."""
    items = utterance.request.items
    counts = [
        (sum(is_message(item, *roles) for item in items), owner) for owner, roles in COUNTED_ROLES
    ]
    total = sum(number for number, _ in counts)
    shares = ", ".join(f"{number} {owner}" for number, owner in counts if number)
    others = {
        "tool result": sum(map(is_output, items)),
        "thought": sum(item.get("type") == "reasoning" for item in items),
    }
    report = f"I can see {format_count(total, 'message')}: {shares}."
    more = [format_count(number, noun) for noun, number in others.items() if number]
    if more:
        report += f" Also {' and '.join(more)}."
    return TextResult(report, total)


@OTHER_RULES.search(
    "quote the instructions", r"\b(?:what (?:are|were)|repeat|quote) your instructions\b"
)
def quote_instructions(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the instructions of this request and the system texts of the context."""
    system = message_texts(utterance.request.items, "system", "developer")
    texts = [text for text in (utterance.request.instructions, *system) if text]
    if not texts:
        return TextResult("I have no instructions.")
    quoted = " ".join(map(quote_text, texts))
    return TextResult(f"My instructions are: {quoted}", "\n".join(texts))


@OTHER_RULES.search(
    "quote a tool result",
    r"\bwhat (?:did (?:the|your|that)(?: last)? tool (?:say|answer|return)"
    r"|was the(?: last)? tool (?:result|output))\b",
)
def quote_last_result(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest tool result of the context."""
    results = tool_results(utterance.request.items)
    if not results:
        return TextResult("I can see no tool result.")
    name, output = results[-1]
    return TextResult(f"{name} said last: {quote_text(output)}", output)


@OTHER_RULES.search("quote a thought", r"\bwhat did you (?:just )?think\b")
def quote_last_reasoning(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest reasoning item."""
    entries = [item for item in utterance.request.items if item.get("type") == "reasoning"]
    if not entries:
        return TextResult("I can see no thought of mine.")
    newest = entries[-1]
    text = (
        extract_text(newest.get("content"))
        or extract_text(newest.get("summary"))
        or utterance.request.read_reasoning(newest)
    )
    if not text:
        return TextResult("My last thought is sealed.", text)
    return TextResult(f"I thought: {quote_text(text)}", text)


@OTHER_RULES.search(
    "recall a fact", r"\bwhat (?P<verb>is|are) my (?P<fact>[\w' -]{1,60}?)\s*\??\s*\Z"
)
def recall_fact(utterance: Utterance, match: re.Match[str]) -> TextResult | None:
    """Answer "What is my …?" from "My … is …", the newest statement first."""
    wanted = _normalize(match["fact"])
    for text in reversed(earlier_texts(utterance, "user")):
        for name, value in reversed(FACT_PATTERN.findall(text)):
            if _normalize(name) == wanted:
                verb = match["verb"].lower()
                return TextResult(f"Your {name.strip()} {verb} {value.strip()}.", value.strip())
    return TextResult(f"You have not told me your {match['fact'].strip()}.")


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())


@OTHER_RULES.search(
    "search the messages",
    r"\b(?:do you remember|did i (?:mention|say anything about|tell you about))\b(.{1,200})",
)
def search_messages(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """Search the earlier messages for a text."""
    wanted = match[1].strip().strip("\"'“”").rstrip("?.! ")
    texts = earlier_texts(utterance, "user", "assistant", "system", "developer")
    for i, text in enumerate(texts, 1):
        if wanted and wanted.lower() in text.lower():
            return TextResult(f"Yes, in message {i}: {quote_text(text)}", True)
    return TextResult(f"No, I can see nothing about {quote_text(wanted)}.", False)


@OTHER_RULES.prefix(
    "do a sum",
    r"(?:what(?:'s| is)|how much is|calculate|compute)?\s*"
    rf"(?!.{{{MAX_LENGTH}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
)
def calculate(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Evaluate an expression and return a text with the expression and its value."""
    expression = match["sum"].strip()
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return TextResult("Nothing can be divided by zero.")
    if value is None:
        return None
    return TextResult(f"{expression} = {format_number(value)}.", value)


OTHER_RULES.prefix("say something", r"(?:say|repeat|echo)\s+(?P<text>.+)")(echo)
