"""Rules for tool calls: which ones a sentence requests, in which order and with which arguments.

A sentence is split at the tool names in it; the text after a name describes that call. After "then" a
call waits for the result of the previous one. The calls that already follow the user's message determine
which remain to be made, so the model stores nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from msgspec import Struct

from kedge.server.practice_model.items import (
    CALL_TYPES,
    is_model_item,
    items_after_last_user,
    tool_results,
)
from kedge.server.practice_model.request import Item, OutputPart, PracticeRequest
from kedge.server.practice_model.rules import RuleList, TextResult
from kedge.server.practice_model.schema_sample import as_schema, sample_value
from kedge.server.practice_model.sentence_values import MAX_SENTENCE_LENGTH, QUOTED, SentenceValues
from kedge.server.practice_model.text import encode_json, quote_text
from kedge.server.practice_model.utterance import Utterance

RULES = RuleList()
IMPLIED_RULES = RuleList()
MAX_CALLS = 64
SENTENCE_CHARACTERS_PER_STEP = 4
"""How much of the text about a call is parsed for one step of its budget."""
VERB = "(?:call|use|run|invoke|try|execute)"
CALL_PATTERN = re.compile(rf"\b{VERB}\b", re.IGNORECASE)
NO_CALL_PATTERN = re.compile(
    rf"\b(?:do not|don't|never|without|not)\s+(?:{VERB}|calling|using)\b", re.IGNORECASE
)
EVERY_TOOL_PATTERN = re.compile(
    rf"\b{VERB}\s+(?:all|both|every|each)\b[\w\s]*\btools?\b", re.IGNORECASE
)
THEN_PATTERN = re.compile(r"\b(?:then|after that|afterwards)\b", re.IGNORECASE)
RESULT_PATTERN = re.compile(r"\b(?:the|its|that)\s+(?:result|answer|output)\b", re.IGNORECASE)
WORD_PATTERN = re.compile(r"[\w.-]*\w")
CLAUSE_TAIL = re.compile(
    rf"(?:[\s,;]+(?:and|then|also|after that|afterwards|{VERB}|the|tool|tools))+[\s,;]*\Z",
    re.IGNORECASE,
)
CLAUSE_HEAD = re.compile(r"\A(?:\s*\btools?\b)?(?:\s*\bwith\b)?[\s:,]*", re.IGNORECASE)
# Words that do not distinguish the name of a tool from others, and words that start a request.
COMMON_WORDS = {
    "a", "an", "and", "do", "fetch", "find", "get", "lookup", "make", "of", "set", "show", "tell",
    "the", "tool",
}  # fmt: skip
REQUEST_WORDS = {
    "book", "check", "create", "fetch", "find", "get", "give", "look", "search", "send", "show",
    "tell",
}  # fmt: skip


class PlannedCall(Struct, frozen=True):
    """A call that a sentence requests: the tool, the text about it, and its step."""

    tool: Item
    text: str
    step: int = 0


def offered_tools(request: PracticeRequest) -> dict[str, Item]:
    """Return the functions and custom tools that ``tool_choice`` allows, by name."""
    if not request.tools or request.tool_choice == "none":
        return {}
    named = {
        str(tool["name"]): tool
        for tool in request.tools
        if tool.get("type", "function") in ("function", "custom") and tool.get("name")
    }
    allowed = _allowed_names(request.tool_choice)
    if allowed is None:
        return named
    return {name: tool for name, tool in named.items() if name in allowed}


def _allowed_names(choice: str | Mapping[str, Any]) -> set[str] | None:
    """Return the names that ``tool_choice`` allows; None if it allows all."""
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


def must_call(request: PracticeRequest) -> bool:
    """Return whether ``tool_choice`` forces a call."""
    choice = request.tool_choice
    if isinstance(choice, str):
        return choice == "required"
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") == "required"
    return choice.get("type") in ("function", "custom")


def make_forced_calls(utterance: Utterance) -> tuple[OutputPart, ...]:
    """Return the calls that the sentence requests or, if there are none, a call of the best tool."""
    tools = offered_tools(utterance.request)
    if not tools:
        return ()
    named = _make_next_calls(utterance, _plan_calls(utterance.sentence, tools))
    if named:
        return named
    best = _match_tool(utterance.sentence, tools) or next(iter(tools.values()))
    return (_make_call(utterance, PlannedCall(best, utterance.sentence)),)


@RULES.search("name the tools", r"\bwhat tools (?:do you have|can you (?:use|call))\b")
def list_tools(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """List the names of the tools."""
    names = list(offered_tools(utterance.request))
    if not names:
        return TextResult("I have no tools here.", names)
    return TextResult(f"My tools are: {', '.join(names)}.", names)


@RULES.prefix("call tools by name", "")
def make_named_calls(utterance: Utterance, _: object = None) -> tuple[OutputPart, ...] | None:
    """Return the calls that the sentence names."""
    planned = _plan_calls(utterance.sentence, offered_tools(utterance.request))
    return _make_next_calls(utterance, planned) or None


@IMPLIED_RULES.prefix("call a tool in plain words", "")
def make_implied_call(utterance: Utterance, _: re.Match[str]) -> tuple[OutputPart, ...] | None:
    """Return a call of the tool whose name consists of words of a question or a request."""
    sentence = utterance.sentence
    is_question = sentence.rstrip().endswith("?")
    is_request = sentence.partition(" ")[0].lower() in REQUEST_WORDS
    if not (is_question or is_request):
        return None
    tool = _match_tool(sentence, offered_tools(utterance.request))
    if tool is None:
        return None
    return _make_next_calls(utterance, [PlannedCall(tool, sentence)]) or None


def _make_next_calls(
    utterance: Utterance, planned: Sequence[PlannedCall]
) -> tuple[OutputPart, ...]:
    """Return the calls of the current step of a plan, or one of them if they must not be parallel."""
    calls_so_far = sum(
        item.get("type") in CALL_TYPES for item in items_after_last_user(utterance.request.items)
    )
    rest = planned[calls_so_far:]
    step = [call for call in rest if call.step == rest[0].step]
    if not utterance.request.parallel_tool_calls:
        step = step[:1]
    return tuple(_make_call(utterance, call) for call in step)


def _plan_calls(sentence: str, tools: Mapping[str, Item]) -> list[PlannedCall]:
    """Split the sentence at the tools that it names."""
    sentence = sentence[:MAX_SENTENCE_LENGTH]
    if not tools or NO_CALL_PATTERN.search(sentence):
        return []
    all_tools = EVERY_TOOL_PATTERN.search(sentence)
    if all_tools is not None:
        clause = sentence[all_tools.end() :]
        return [PlannedCall(tool, clause) for tool in tools.values()][:MAX_CALLS]
    mentions = _find_mentions(sentence, tools)
    planned: list[PlannedCall] = []
    step = 0
    for mention, following in zip_longest(mentions, mentions[1:]):
        if following is None:
            planned.append(PlannedCall(tools[mention.name], sentence[mention.end :], step))
            break
        between = sentence[mention.end : following.start]
        clause = CLAUSE_TAIL.sub("", between)
        planned.append(PlannedCall(tools[mention.name], clause, step))
        if THEN_PATTERN.search(between[len(clause) :]):
            step += 1
    return planned[:MAX_CALLS]


class ToolMention(NamedTuple):
    """The name of a tool in a sentence, and its position."""

    name: str
    start: int
    end: int


def _find_mentions(sentence: str, tools: Mapping[str, Item]) -> list[ToolMention]:
    """Return the tool names in a sentence.

    A name that is an ordinary word counts only after a word like "call" or as the first word.
    """
    names = {name.lower(): name for name in tools}
    first_verb = CALL_PATTERN.search(sentence)
    mentions: list[ToolMention] = []
    for word in WORD_PATTERN.finditer(sentence):
        name = names.get(word[0].lower())
        is_value = sentence[: word.start()].endswith(("=", ":", '"', "'", "“", "/"))
        if name is None or is_value:
            continue
        follows_verb = first_verb is not None and word.start() > first_verb.end()
        if "_" in name or word.start() == 0 or follows_verb:
            mentions.append(ToolMention(name, word.start(), word.end()))
    return mentions


def _match_tool(sentence: str, tools: Mapping[str, Item]) -> Item | None:
    """Return the tool with the most words in its name that are all in the sentence."""
    sentence_words = set(re.findall(r"[a-z0-9]+", sentence.lower()))
    best: Item | None = None
    most_words = 0
    for name, tool in tools.items():
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
        words = set(re.findall(r"[a-z0-9]+", split.lower())) - COMMON_WORDS
        if words <= sentence_words and len(words) > most_words:
            best = tool
            most_words = len(words)
    return best


def _make_call(utterance: Utterance, planned: PlannedCall) -> OutputPart:
    name = str(planned.tool["name"])
    clause = CLAUSE_HEAD.sub("", planned.text).strip()
    utterance.budget.spend_steps(len(clause) // SENTENCE_CHARACTERS_PER_STEP)
    facts: list[str] = []
    results = tool_results(items_after_last_user(utterance.request.items))
    if results and RESULT_PATTERN.search(clause):
        _, newest = results[-1]
        facts.append(newest)
        clause = RESULT_PATTERN.sub(" ", clause)

    if planned.tool.get("type") == "custom":
        custom_input = "".join(facts) or _read_custom_input(clause)
        return OutputPart("custom_tool_call", custom_input, name)
    values = SentenceValues(clause, facts=facts)
    schema = {"type": "object", **as_schema(planned.tool.get("parameters"))}
    arguments: Any = sample_value(
        schema, values, lambda member: values.remainder or member, utterance.budget
    )
    return OutputPart("function_call", encode_json(arguments or {}), name)


def _read_custom_input(words: str) -> str:
    """Return the input of a custom tool: the quoted text, else all the text about it."""
    quoted = QUOTED.search(words)
    if quoted is not None:
        return quoted[0][1:-1]
    return re.sub(r"\A(?:on|to|for|saying)\s+", "", words.strip(" .")) or "text"


def report_results(utterance: Utterance) -> TextResult | None:
    """Report the results of the calls after the user's message, when all of them are available."""
    items = items_after_last_user(utterance.request.items)
    if not items or is_model_item(items[-1]):
        return None
    results = tool_results(items)
    if not results:
        return None
    report = " ".join(f"{name} says: {_end_sentence(output)}" for name, output in results)
    return TextResult(report, parse_output(results[-1][1]))


def parse_output(output: str) -> Any:
    """Parse an output as JSON, or return its text if it is not JSON."""
    try:
        return json.loads(output)
    except (ValueError, RecursionError):
        return output


def _end_sentence(text: str) -> str:
    text = text.strip()
    if text.endswith((".", "!", "?", "}", "]")):
        return text
    return f"{text}."


@RULES.prefix(
    "call tools by name",
    rf"{VERB}\s+(?:the\s+)?(?:tool\s+(?P<a>\w+)|(?P<b>\w+_\w+)|(?P<c>\w+)\s+tool)\b",
)
def report_unknown_tool(utterance: Utterance, match: re.Match[str]) -> TextResult | None:
    """Report that the named tool is not offered."""
    called = match["a"] or match["b"] or match["c"]
    names = list(offered_tools(utterance.request))
    if called in names:
        return None
    available = "I have no tools here."
    if names:
        available = f"my tools are: {', '.join(names)}."
    return TextResult(f"I have no tool named {quote_text(called)}; {available}")
