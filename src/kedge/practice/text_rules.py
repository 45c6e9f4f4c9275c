"""Rules for texts: echo one, write at length, count, refuse; quote and count messages, recall facts.

"Earlier" never includes the question itself, so a server that has lost the context is detected
by the first question about the past.
"""

import re
from itertools import cycle, islice

from kedge.practice.context import extract_text, is_message, is_output, message_texts, tool_results
from kedge.practice.rule import (
    TextResult,
    Utterance,
    format_count,
    prefix_rule,
    quote_text,
    search_rule,
)

MAX_TIMES = 1_000
MAX_WORDS = 100_000
MAX_REPEAT_LENGTH = 2_000
TIMES_PATTERN = re.compile(r"\A(.*?)[\s,]+(\d{1,6}) times\W*\Z", re.DOTALL | re.IGNORECASE)
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
        once = strip_quotes(times[1].rstrip(":, "))
        return TextResult(" ".join([once] * min(int(times[2]), MAX_TIMES)), once)
    return TextResult(strip_quotes(text), strip_quotes(text))


def strip_quotes(text: str) -> str:
    """Remove a pair of quotation marks around the text."""
    is_quoted = len(text) > 1 and QUOTE_PAIRS.get(text[0]) == text[-1]
    return text[1:-1] if is_quoted else text


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
    prefix_rule("say something", r"(?:say|repeat|echo)(?:\s*:\s*|\s+(?=[\"“']))(?P<text>.+)", echo),
    prefix_rule("refuse", r"refuse\b(?:\s+to\b)?[\s:,]*(?P<what>.*)", refuse),
    prefix_rule("write at length", r"write\s+(\d{1,9})\s+words?\b", write_words),
    prefix_rule("count to a number", r"count\s+(?:from 1\s+)?to\s+(\d{1,9})\b", count_to),
)
LOOSE_RULES = (prefix_rule("say something", r"(?:say|repeat|echo)\s+(?P<text>.+)", echo),)


SPEAKERS = {"i": ("user", "You", "yours"), "you": ("assistant", "I", "mine")}
"""The messages that a pronoun refers to: their role, and the pronouns of the answer."""
FACT_PATTERN = re.compile(r"\bmy ([\w' -]{1,60}?) is ([^.!?\n]{1,200})", re.IGNORECASE)


def earlier_texts(utterance: Utterance, *roles: str) -> list[str]:
    """Return the texts of the messages of these roles, without the newest user message."""
    items = utterance.request.items
    for i in range(len(items) - 1, -1, -1):
        if is_message(items[i], "user"):
            return message_texts([*items[:i], *items[i + 1 :]], *roles)
    return message_texts(items, *roles)


def quote_message(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """Quote the first or the last message of the user or of the model."""
    role, subject, owner = SPEAKERS[match["whose"].lower()]
    texts = earlier_texts(utterance, role)
    if not texts:
        return TextResult(f"I cannot see it: there is no message of {owner} before this one.")
    which = "first" if "first" in match["which"].lower().split() else "last"
    text = texts[0] if which == "first" else texts[-1]
    return TextResult(f"{subject} said {which}: {quote_text(text)}", text)


def list_messages(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """List the messages of the user or of the model so far, with numbers."""
    texts = earlier_texts(utterance, SPEAKERS[match["whose"].lower()][0])
    if not texts:
        return TextResult("Nothing has been said before this message.", [])
    return TextResult("\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1)), texts)


# The counted groups of messages, in the order of the report.
COUNTED_ROLES = (
    ("of yours", ("user",)),
    ("of mine", ("assistant",)),
    ("of the system", ("system", "developer")),
)


def count_messages(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Count the messages and, if there are any, the tool results and reasoning items."""
    items = utterance.request.items
    counts = [
        (sum(is_message(item, *roles) for item in items), owner) for owner, roles in COUNTED_ROLES
    ]
    total = sum(number for number, _ in counts)
    shares = ", ".join(f"{number} {owner}" for number, owner in counts if number)
    more = [
        format_count(number, noun)
        for number, noun in (
            (sum(map(is_output, items)), "tool result"),
            (sum(item.get("type") == "reasoning" for item in items), "thought"),
        )
        if number
    ]
    also = f" Also {' and '.join(more)}." if more else ""
    return TextResult(f"I can see {format_count(total, 'message')}: {shares}.{also}", total)


def recall_fact(utterance: Utterance, match: re.Match[str]) -> TextResult | None:
    """Answer "What is my …?" from "My … is …", the newest statement first."""
    wanted = _normalize(match[1])
    for text in reversed(earlier_texts(utterance, "user")):
        for name, value in reversed(FACT_PATTERN.findall(text)):
            if _normalize(name) == wanted:
                return TextResult(f"Your {name.strip()} is {value.strip()}.", value.strip())
    return TextResult(f"You have not told me your {match[1].strip()}.")


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())


def quote_instructions(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the instructions of this request and the system texts of the context."""
    system = message_texts(utterance.request.items, "system", "developer")
    texts = [text for text in (utterance.request.instructions, *system) if text]
    if not texts:
        return TextResult("I have no instructions.")
    quoted = " ".join(map(quote_text, texts))
    return TextResult(f"My instructions are: {quoted}", "\n".join(texts))


def quote_last_result(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest tool result of the context."""
    results = tool_results(utterance.request.items)
    if not results:
        return TextResult("I can see no tool result.")
    name, output = results[-1]
    return TextResult(f"{name} said last: {quote_text(output)}", output)


def quote_last_reasoning(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest reasoning item."""
    entries = [item for item in utterance.request.items if item.get("type") == "reasoning"]
    if not entries:
        return TextResult("I can see no thought of mine.")
    text = extract_text(entries[-1].get("content")) or extract_text(entries[-1].get("summary"))
    text = text or utterance.request.read_reasoning(entries[-1])
    return TextResult(
        f"I thought: {quote_text(text)}" if text else "My last thought is sealed.", text
    )


RECALL_RULES = (
    search_rule(
        "list the messages",
        r"\bwhat (?:did|have) (?P<whose>i|you) sa(?:y|id) so far",
        list_messages,
    ),
    search_rule(
        "quote a message",
        r"\bwhat (?:did|have) (?P<whose>i|you) (?:just )?sa(?:y|id)\b(?P<which>[^?.!]*)",
        quote_message,
    ),
    search_rule("count the messages", r"\bhow many messages\b", count_messages),
    search_rule("quote the instructions", r"\bwhat are your instructions\b", quote_instructions),
    search_rule("quote a tool result", r"\bwhat did the tool say\b", quote_last_result),
    search_rule("quote a thought", r"\bwhat did you think\b", quote_last_reasoning),
    search_rule("recall a fact", r"\bwhat is my ([\w' -]{1,60}?)\s*\??\s*\Z", recall_fact),
)
