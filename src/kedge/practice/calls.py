"""Calling tools: which ones a sentence asks for, in which order, with which arguments.

A sentence is cut at the tool names in it; what follows a name is about that call. "Then" between
two calls makes the second wait for the result of the first. Which calls are still to be made is told
by the calls that already follow the user's message, so the model needs no memory of its own.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kedge.practice.context import CALLS, is_own, results, since_last_said
from kedge.practice.filling import fill
from kedge.practice.hints import LONGEST, QUOTED, Hints
from kedge.practice.rule import Heard, Said, anywhere, opening, quoted
from kedge.practice.schemas import mapping
from kedge.practice.values import Ask, Call, Item

MOST_CALLS = 64
VERBS = ("call", "use", "run", "invoke", "try", "execute")
VERB = rf"(?:{'|'.join(VERBS)})"
CALLING = re.compile(rf"\b{VERB}\b", re.IGNORECASE)
NOT_CALLING = re.compile(
    rf"\b(?:do not|don't|never|without|not)\s+(?:{VERB}|calling|using)\b", re.IGNORECASE
)
EVERY = re.compile(rf"\b{VERB}\s+(?:all|both|every|each)\b[\w\s]*\btools?\b", re.IGNORECASE)
THEN = re.compile(r"\b(?:then|after that|afterwards)\b", re.IGNORECASE)
TWICE = re.compile(r"\b(?:twice|two times)\b", re.IGNORECASE)
RESULT = re.compile(r"\b(?:the|its|that)\s+(?:result|answer|output)\b", re.IGNORECASE)
WORD = re.compile(r"[\w.-]*\w")
TAIL = re.compile(
    rf"(?:[\s,;]+(?:and|then|also|after that|afterwards|{VERB}|the|tool|tools))+[\s,;]*\Z",
    re.IGNORECASE,
)
HEAD = re.compile(r"\A(?:\s*\btools?\b)?(?:\s*\bwith\b)?[\s:,]*", re.IGNORECASE)
# Words of a tool's name that tell it from no other, and words that open a request.
COMMON = set(re.findall(r"\w+", "a an the get set fetch find do make show tell lookup tool of and"))
ASKING = set(re.findall(r"\w+", "get show tell find check look fetch give search book send create"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call that a sentence asks for: the tool, the words about it, and its place in line."""

    tool: Item
    words: str
    step: int = 0


def offered(ask: Ask) -> dict[str, Item]:
    """Name the tools that may be called: functions and custom tools that ``tool_choice`` allows."""
    if not ask.tools or ask.tool_choice == "none":
        return {}
    named = {
        str(tool["name"]): tool
        for tool in ask.tools
        if tool.get("type", "function") in ("function", "custom") and tool.get("name")
    }
    allowed = _allowed(ask.tool_choice)
    return named if allowed is None else {name: named[name] for name in named if name in allowed}


def _allowed(choice: str | Mapping[str, Any]) -> set[str] | None:
    if isinstance(choice, str):
        return None
    match choice.get("type"):
        case "function" | "custom":
            return {str(choice.get("name"))}
        case "allowed_tools":
            tools = cast("Sequence[Item]", choice.get("tools", ()))
            return {str(tool.get("name")) for tool in tools}
        case _:
            return None


def must_call(ask: Ask) -> bool:
    """Whether ``tool_choice`` leaves nothing but a call."""
    choice = ask.tool_choice
    if isinstance(choice, str):
        return choice == "required"
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") == "required"
    return choice.get("type") in ("function", "custom")


def forced(heard: Heard) -> tuple[Call, ...]:
    """Make the calls that the sentence asks for or, where it asks for none, of the best tool."""
    tools = offered(heard.ask)
    if not tools:
        return ()
    due = _due(heard, _wanted(heard.sentence, tools))
    best = _loosely(heard.sentence, tools) or next(iter(tools.values()))
    return due or (_call(heard, Wanted(best, heard.sentence)),)


def asked(heard: Heard, _: object = None) -> tuple[Call, ...] | None:
    """Make the calls that the sentence names."""
    tools = offered(heard.ask)
    return (_due(heard, _wanted(heard.sentence, tools)) or None) if tools else None


def implied(heard: Heard, _: re.Match[str]) -> tuple[Call, ...] | None:
    """Make the call that a question or a request has the words for."""
    tools = offered(heard.ask)
    if not tools:
        return None
    opening_word = heard.sentence.lower().partition(" ")[0]
    if not heard.sentence.rstrip().endswith("?") and opening_word not in ASKING:
        return None
    tool = _loosely(heard.sentence, tools)
    return (_due(heard, [Wanted(tool, heard.sentence)]) or None) if tool else None


def _due(heard: Heard, wanted: Sequence[Wanted]) -> tuple[Call, ...]:
    """Make the next calls of a plan: those of its current step, one by one where need be."""
    made = sum(item.get("type") in CALLS for item in since_last_said(heard.ask.items))
    rest = wanted[made:]
    step = [each for each in rest if each.step == rest[0].step]
    if not heard.ask.parallel_tool_calls:
        step = step[:1]
    return tuple(_call(heard, each) for each in step)


def _wanted(sentence: str, tools: Mapping[str, Item]) -> list[Wanted]:
    """Cut the sentence at the tools it names."""
    sentence = sentence[:LONGEST]
    if NOT_CALLING.search(sentence):
        return []
    if every := EVERY.search(sentence):
        return [Wanted(tool, sentence[every.end() :]) for tool in tools.values()][:MOST_CALLS]
    places = _mentions(sentence, tools)
    wanted: list[Wanted] = []
    step = 0
    for i, (name, _, end) in enumerate(places):
        stop = places[i + 1][1] if i + 1 < len(places) else len(sentence)
        words = sentence[end:stop]
        clause = words if stop == len(sentence) else TAIL.sub("", words)
        again = TWICE.search(clause)
        wanted += [Wanted(tools[name], TWICE.sub("", clause), step)] * (2 if again else 1)
        step += bool(THEN.search(words[len(clause) :]))
    return wanted[:MOST_CALLS]


def _mentions(sentence: str, tools: Mapping[str, Item]) -> list[tuple[str, int, int]]:
    """Find the tool names of a sentence, with their places.

    A name that is an ordinary word counts only after a word like "call" or as the first word.
    """
    known = {name.lower(): name for name in tools}
    calling = CALLING.search(sentence)
    start = calling.end() if calling else len(sentence)
    return [
        (name, word.start(), word.end())
        for word in WORD.finditer(sentence)
        if (name := known.get(word[0].lower())) is not None
        and sentence[: word.start()][-1:] not in ("=", ":", '"', "'", "“", "/")
        and ("_" in name or word.start() == 0 or word.start() > start)
    ]


def _loosely(sentence: str, tools: Mapping[str, Item]) -> Item | None:
    """Find the tool whose name has most of its own words in the sentence, and no others."""
    said = set(re.findall(r"[a-z0-9]+", sentence.lower()))
    best: tuple[int, Item] | None = None
    for name, tool in tools.items():
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
        words = set(re.findall(r"[a-z0-9]+", split.lower())) - COMMON
        if words and words <= said and (best is None or len(words) > best[0]):
            best = (len(words), tool)
    return best[1] if best else None


def _call(heard: Heard, wanted: Wanted) -> Call:
    name = str(wanted.tool["name"])
    words = HEAD.sub("", wanted.words).strip()
    known = results(since_last_said(heard.ask.items))
    result = known[-1][1] if known and RESULT.search(words) else None
    if wanted.tool.get("type") == "custom":
        return Call(name, result or _input(words), custom=True)
    hints = Hints(RESULT.sub(" ", words) if result else words)
    schema = {"type": "object", **mapping(wanted.tool.get("parameters"))}
    arguments: Any = fill(schema, hints, lambda member: hints.rest or member, result) or {}
    return Call(name, json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))


def _input(words: str) -> str:
    """Read the free text for a custom tool: what is quoted, else all that is said about it."""
    if found := QUOTED.search(words):
        return found[0][1:-1]
    return re.sub(r"\A(?:on|to|for|saying)\s+", "", words.strip(" .")) or "text"


def report(heard: Heard) -> Said | None:
    """Tell the results of the calls that follow the user's message, once all are there."""
    items = since_last_said(heard.ask.items)
    if not items or is_own(items[-1]):
        return None
    found = results(items)
    if not found:
        return None
    told = " ".join(f"{name} says: {_sentence(output)}" for name, output in found)
    return Said(told, _fact(found[-1][1]))


def _fact(output: str) -> Any:
    """Read an output as JSON where it is that."""
    try:
        return json.loads(output)
    except (ValueError, RecursionError):
        return output


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?", "}", "]")) else f"{text}."


def list_tools(heard: Heard, _: re.Match[str]) -> Said:
    """Name the tools."""
    names = list(offered(heard.ask))
    return Said(f"My tools are: {', '.join(names)}." if names else "I have no tools here.", names)


def unknown_tool(heard: Heard, match: re.Match[str]) -> Said | None:
    """Say so where a tool is called that is not there."""
    called = match["a"] or match["b"] or match["c"]
    names = list(offered(heard.ask))
    if called in names:
        return None
    have = f"my tools are: {', '.join(names)}." if names else "I have no tools here."
    return Said(f"I have no tool named {quoted(called)}; {have}")


RULES = (
    anywhere(
        "name the tools",
        ("tools",),
        r"\bwhat tools (?:do you have|can you (?:use|call))\b",
        list_tools,
    ),
    opening("call tools by name", ("",), "", asked),
    opening(
        "call tools by name",
        VERBS,
        rf"{VERB}\s+(?:the\s+)?(?:tool\s+(?P<a>\w+)|(?P<b>\w+_\w+)|(?P<c>\w+)\s+tool)\b",
        unknown_tool,
    ),
)
IMPLIED = (opening("call a tool in plain words", ("",), "", implied),)
