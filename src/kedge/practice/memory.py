"""What the model remembers: quoting, counting and searching the context, and the facts in it.

"Earlier" never includes the question itself, so a server that has forgotten everything is caught
by the first question about the past.
"""

import re

from kedge.practice.context import is_message, is_output, messages, results, text_of
from kedge.practice.rule import Heard, Said, anywhere, opening, plural, quoted

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth",
            "tenth")  # fmt: skip
ORDINAL = rf"{'|'.join(ORDINALS)}|\d{{1,6}}(?:st|nd|rd|th)|last|previous|latest"
SAID = r"(?:say|said|write|written|ask|asked|answer|answered|reply|replied|tell you|told you)"
WHOSE = {"i": ("user",), "my": ("user",), "you": ("assistant",), "your": ("assistant",)}
FACT = re.compile(r"\bmy ([\w' -]{1,60}?) (?:is|are) ([^.!?\n]{1,200})", re.IGNORECASE)


def earlier(heard: Heard, *roles: str) -> list[str]:
    """Collect the messages of these roles, without the one that asks."""
    items = heard.ask.items
    for i in range(len(items) - 1, -1, -1):
        if is_message(items[i], "user"):
            return messages([*items[:i], *items[i + 1 :]], *roles)
    return messages(items, *roles)


def quote(heard: Heard, match: re.Match[str]) -> Said:
    """Quote one message: the first, the last, the n-th, of the user or of the model."""
    whose = match["whose"].lower()
    found = re.search(rf"\b({ORDINAL})\b", match["which"] or "", re.IGNORECASE)
    which = found[1].lower() if found else "last"
    theirs = earlier(heard, *WHOSE.get(whose, ("user", "assistant")))
    position = _position(which, len(theirs))
    if not 0 <= position < len(theirs):
        return Said(f"I cannot see it: {_seen(len(theirs), whose)} before this one.")
    subject = {"i": "You", "my": "You", "you": "I", "your": "I"}.get(whose)
    text = theirs[position]
    if subject is None:
        return Said(f"The {which} message is: {quoted(text)}", text)
    return Said(f"{subject} said {which}: {quoted(text)}", text)


def _position(which: str, count: int) -> int:
    if which in ORDINALS:
        return ORDINALS.index(which)
    if which[0].isdigit():
        return int(which[:-2]) - 1
    return count - 1


def _seen(count: int, whose: str) -> str:
    owner = {"i": " of yours", "my": " of yours", "you": " of mine", "your": " of mine"}
    number = "no message" if count == 0 else f"only {plural(count, 'message')}"
    return f"there is {number}{owner.get(whose, '')}"


def list_messages(heard: Heard, match: re.Match[str]) -> Said:
    """List the messages so far, with numbers."""
    whose = (match["whose"] or "").lower()
    said = earlier(heard, *WHOSE.get(whose, ("user", "assistant")))
    if not said:
        return Said("Nothing has been said before this message.", [])
    return Said("\n".join(f"{i}. {text}" for i, text in enumerate(said, 1)), said)


# What is counted, in the order in which it is told.
COUNTED = (
    ("of yours", ("user",)),
    ("of mine", ("assistant",)),
    ("of the system", ("system", "developer")),
)


def count(heard: Heard, _: re.Match[str]) -> Said:
    """Count the messages and, where there are any, the tool results and thoughts."""
    items = heard.ask.items
    counts = [(sum(is_message(item, *roles) for item in items), owner) for owner, roles in COUNTED]
    total = sum(number for number, _ in counts)
    shares = ", ".join(f"{number} {owner}" for number, owner in counts if number)
    more = [
        plural(number, noun)
        for number, noun in (
            (sum(map(is_output, items)), "tool result"),
            (sum(item.get("type") == "reasoning" for item in items), "thought"),
        )
        if number
    ]
    also = f" Also {' and '.join(more)}." if more else ""
    return Said(f"I can see {plural(total, 'message')}: {shares}.{also}", total)


def fact(heard: Heard, match: re.Match[str]) -> Said | None:
    """Answer "What is my …?" from "My … is …", the newest statement first."""
    wanted = _plain(match[1])
    for text in reversed(earlier(heard, "user")):
        for name, value in reversed(FACT.findall(text)):
            if _plain(name) == wanted:
                verb = "are" if match[0].lower().split()[1] == "are" else "is"
                return Said(f"Your {name.strip()} {verb} {value.strip()}.", value.strip())
    return Said(f"You have not told me your {match[1].strip()}.")


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def mentioned(heard: Heard, match: re.Match[str]) -> Said:
    """Search the earlier messages for a text."""
    wanted = match[1].strip().strip("\"'“”").rstrip("?.! ")
    for i, text in enumerate(earlier(heard, "user", "assistant", "system", "developer"), 1):
        if wanted and wanted.lower() in text.lower():
            return Said(f"Yes, in message {i}: {quoted(text)}", True)
    return Said(f"No, I can see nothing about {quoted(wanted)}.", False)


def instructions(heard: Heard, _: re.Match[str]) -> Said:
    """Quote the instructions of this request and the system texts of the context."""
    system = messages(heard.ask.items, "system", "developer")
    texts = [text for text in (heard.ask.instructions, *system) if text]
    if not texts:
        return Said("I have no instructions.")
    told = " ".join(map(quoted, texts))
    return Said(f"My instructions are: {told}", "\n".join(texts))


def last_result(heard: Heard, _: re.Match[str]) -> Said:
    """Quote the newest tool result of the whole context."""
    known = results(heard.ask.items)
    if not known:
        return Said("I can see no tool result.")
    name, output = known[-1]
    return Said(f"{name} said last: {quoted(output)}", output)


def last_thought(heard: Heard, _: re.Match[str]) -> Said:
    """Quote the newest reasoning that can be read."""
    thoughts = [item for item in heard.ask.items if item.get("type") == "reasoning"]
    if not thoughts:
        return Said("I can see no thought of mine.")
    text = text_of(thoughts[-1].get("content")) or text_of(thoughts[-1].get("summary"))
    return Said(f"I thought: {quoted(text)}" if text else "My last thought is sealed.", text)


RULES = (
    anywhere(
        "list the messages",
        ("what",),
        rf"\bwhat (?:did|have) (?P<whose>i|you|we) {SAID} (?:so far|until now|in all|altogether)",
        list_messages,
    ),
    opening(
        "list the messages",
        ("repeat", "list"),
        r"(?:repeat|list) (?:everything|all|all the messages|the messages)"
        r"(?: (?:that )?(?P<whose>i|you|we)(?: have)? said)?(?: so far)?\W*\Z",
        list_messages,
    ),
    anywhere(
        "quote a message",
        ("what",),
        rf"\bwhat (?:did|have) (?P<whose>i|you) (?:just )?{SAID}\b(?P<which>[^?.!]*)",
        quote,
    ),
    anywhere(
        "quote a message",
        ("what", "quote", "repeat"),
        r"\b(?:what (?:was|is)|quote|repeat) (?P<whose>my|your|the) "
        rf"(?P<which>{ORDINAL}) (?:message|question|answer|sentence|thing)\b",
        quote,
    ),
    anywhere(
        "count the messages",
        ("messages",),
        r"\b(?:how many|count (?:the|my|our|all)) messages\b",
        count,
    ),
    anywhere(
        "quote the instructions",
        ("instructions",),
        r"\b(?:what (?:are|were)|repeat|quote) your instructions\b",
        instructions,
    ),
    anywhere(
        "quote a tool result",
        ("tool",),
        r"\bwhat (?:did (?:the|your|that)(?: last)? tool (?:say|answer|return)"
        r"|was the(?: last)? tool (?:result|output))\b",
        last_result,
    ),
    anywhere("quote a thought", ("think",), r"\bwhat did you (?:just )?think\b", last_thought),
    anywhere("recall a fact", (" my ",), r"\bwhat (?:is|are) my ([\w' -]{1,60}?)\s*\??\s*\Z", fact),
    anywhere(
        "search the messages",
        ("remember", "did i"),
        r"\b(?:do you remember|did i (?:mention|say anything about|tell you about))\b(.{1,200})",
        mentioned,
    ),
)
