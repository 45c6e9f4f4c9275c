"""The request and the answer of the practice model, the items of its context as plain text, and phrase rules.

Items have all the forms that clients send: messages with or without a ``type``, content as a string
or as parts. No function here raises an error for a malformed item; content without text is an empty
string, and images and files become a short marker.

A rule has a pattern, and the handler that answers it. A handler gets the utterance and the match of its pattern. It
returns a text, the calls to make, or None if it has no answer and the next rule applies.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, Literal, NamedTuple, TypeVar, cast

from msgspec import Struct

from kedge.errors import SchemaTooComplex

Item = Mapping[str, Any]


class PracticeRequest(Struct, frozen=True):
    """One request to the practice model.

    Args:
        items: The effective context as items of the Responses API, oldest first.
        instructions: The instructions of the request.
        tools: The offered tools.
        tool_choice: ``auto``, ``none``, ``required``, or an object that names tools.
        parallel_tool_calls: Whether several calls may be made at once.
        text_format: The ``text.format`` of the request.
        reasoning: The ``reasoning`` of the request.
        read_reasoning: Returns the text of an earlier reasoning item whose text is hidden from the client.
    """

    items: Sequence[Item]
    instructions: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text_format: Mapping[str, Any] | None = None
    reasoning: Mapping[str, Any] | None = None
    read_reasoning: Callable[[Item], str] = lambda _: ""


ItemKind = Literal["text", "refusal", "reasoning", "function_call", "custom_tool_call"]


class OutputPart(Struct, frozen=True):
    """One item of an answer.

    Args:
        kind: The kind of the item.
        text: Its text; of a call, the arguments or, for a custom tool, the input.
        name: The name of the tool, for a call.
    """

    kind: ItemKind
    text: str
    name: str = ""


class PracticeOutput(Struct, frozen=True):
    """An answer.

    Args:
        parts: Its parts, in order.
        pace: Seconds between two streamed chunks.
    """

    parts: tuple[OutputPart, ...]
    pace: float = 0.0


CALL_TYPES = ("function_call", "custom_tool_call")
CLIENT_ROLES = ("user", "system", "developer")


def is_message(item: Item, *roles: str) -> bool:
    """Return whether the item is a message, of one of these roles if any are given."""
    if item.get("type", "message") != "message":
        return False
    role = item.get("role")
    return role in roles if roles else isinstance(role, str)


def is_output(item: Item) -> bool:
    """Return whether the item is the output of a tool call."""
    return str(item.get("type", "")).endswith("_output")


def is_model_item(item: Item) -> bool:
    """Return whether the model wrote the item: an answer, a call or reasoning."""
    return not (is_output(item) or is_message(item, *CLIENT_ROLES))


def extract_text(content: object) -> str:
    """Return the plain text of a content: a string, one part, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = map(extract_text, cast("Sequence[object]", content))
        return " ".join(filter(None, texts))
    part = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return part[key]
    if part.get("type") == "input_file":
        return f"[file {part.get('filename') or part.get('file_id') or ''}".rstrip() + "]"
    return "[image]" if part.get("type") == "input_image" else ""


def message_texts(items: Sequence[Item], *roles: str) -> list[str]:
    """Return the texts of the messages of these roles, oldest first."""
    return [extract_text(item.get("content")) for item in items if is_message(item, *roles)]


class CountedItems(Sequence[Item]):
    """Items whose messages were counted when they were stored."""

    __slots__ = ()

    @property
    @abstractmethod
    def message_count(self) -> int:
        """The number of messages, as the function of this name counts them."""


def message_count(items: Sequence[Item]) -> int:
    """Return the number of messages."""
    if not isinstance(items, (list, tuple)) and isinstance(items, CountedItems):
        return items.message_count
    return [item.get("type", "message") for item in items].count("message")


def last_user_text(items: Sequence[Item]) -> str:
    """Return the text of the newest user message; empty if there is none."""
    texts = (
        extract_text(each.get("content")) for each in reversed(items) if is_message(each, "user")
    )
    return next(texts, "")


def items_after_last_user(items: Sequence[Item]) -> Sequence[Item]:
    """Return the items after the newest user message: the current round of tool calls."""
    return [*takewhile(lambda item: not is_message(item, "user"), reversed(items))][::-1]


def tool_results(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return the tool's name and the text of its output, for each result among these items."""
    names = {
        str(item.get("call_id")): str(item.get("name") or "the tool")
        for item in items
        if "call_id" in item and not is_output(item)
    }
    return [
        (names.get(str(item.get("call_id")), "the tool"), extract_text(item.get("output")))
        for item in items
        if is_output(item)
    ]


def count_answers(items: Sequence[Item]) -> int:
    """Count the model's answers, which are consecutive items of the model between items of the client."""
    return sum(is_model for is_model, _ in groupby(items, is_model_item))


_OTHER_FORMS = str.maketrans(
    "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}\N{LATIN SMALL LETTER DOTLESS I}\N{LATIN SMALL LETTER LONG S}",
    "iis",
)


def fold_case(text: str) -> str:
    """Return the text in lower case; the letters that ``re.IGNORECASE`` matches with ``i`` and ``s`` become these."""
    return text.lower() if text.isascii() else text.translate(_OTHER_FORMS).lower()


MAX_STEPS = 10_000
"""The steps of all samples of one answer."""
MAX_OUTPUT_BYTES = 100_000
"""The size of all samples of one answer, as JSON."""


class SampleBudget:
    """The work and the output that remain for the samples of one answer."""

    steps = MAX_STEPS
    output_bytes = MAX_OUTPUT_BYTES

    def spend(self, steps: int = 0, output_bytes: int = 0) -> None:
        """Subtract steps and bytes.

        Raises:
            SchemaTooComplex: One of them is used up.
        """
        self.steps -= steps
        self.output_bytes -= output_bytes
        if self.steps < 0:
            raise SchemaTooComplex(f"takes more than {MAX_STEPS:,} steps")
        if self.output_bytes < 0:
            raise SchemaTooComplex(f"has more than {MAX_OUTPUT_BYTES:,} bytes")


SLOW, VERY_SLOW, MAX_PACE = 0.05, 0.25, 10.0
FLAGS = re.IGNORECASE | re.DOTALL

POLITE = re.compile(
    r"(?:please|ok|and|now|then|so|(?:can|could|would) you)\b[,.!:]*\s+", re.IGNORECASE
)
SLOWLY = re.compile(r"(very\s+)?slowly\b[\s,:.]*(?:and\s+)?", re.IGNORECASE)
SLOWLY_AT_END = re.compile(r"[\s,]+(very\s+)?slowly\s*([.!?]?)\s*\Z", re.IGNORECASE)
EVERY_SECONDS = re.compile(
    r"every\s+(\d{1,3}(?:\.\d{1,4})?)\s*(?:s|seconds?)\b[\s,:]*", re.IGNORECASE
)
THINK = re.compile(r"think\b(?:\s+about\b|\s+and\b)?[\s,:.]*", re.IGNORECASE)
INVALID = re.compile(r"(first|always)\s+invalid\b[\s,:.]*", re.IGNORECASE)
CORRECTION = "That does not have the form asked for"
"""The start of a message that requests an answer again, because it did not match its schema."""


MAX_MODIFIERS = 8
END_WINDOW = 40
SEARCH_WINDOW = 500
"""A question is at the end of a long message, not in the middle of a pasted text."""
SEARCH_WORDS = ("what", "quote", "repeat", "how", "count", "do", "did")
"""The first words of all phrases that are searched. A sentence without them is not searched ten times."""
SEARCH_WORD = re.compile(rf"\b(?:{'|'.join(SEARCH_WORDS)})\b")


def _read_slow(found: "re.Match[str]") -> dict[str, Any]:
    return {"pace": VERY_SLOW if found[1] else SLOW}


MODIFIERS: tuple[tuple[re.Pattern[str], Callable[["re.Match[str]"], dict[str, Any]]], ...] = (
    (POLITE, lambda _: {}),
    (SLOWLY, _read_slow),
    (EVERY_SECONDS, lambda found: {"pace": min(float(found[1]), MAX_PACE)}),
    (THINK, lambda _: {"think": True}),
    (INVALID, lambda found: {"invalid": fold_case(found[1])}),
)
"""Patterns of text before a sentence, and the fields of ``Utterance`` that they set."""
ANY_MODIFIER = re.compile(
    "|".join(f"(?:{pattern.pattern})" for pattern, _ in MODIFIERS), re.IGNORECASE
)
"""A pattern that matches if one of them does, which is rare."""


def parse_utterance(request: PracticeRequest) -> "Utterance":
    """Parse the newest user message, and the words in it that determine how it is answered."""
    message = last_user_text(request.items)
    is_corrected = message.startswith(CORRECTION)
    if is_corrected:  # the question is the one before
        texts = message_texts(request.items, "user")
        message = next((text for text in texts[::-1] if not text.startswith(CORRECTION)), message)
    sentence, fields = message.strip(), dict[str, Any](is_corrected=is_corrected)
    for _ in range(MAX_MODIFIERS):
        for pattern, read in MODIFIERS if ANY_MODIFIER.match(sentence) else ():
            if found := pattern.match(sentence):
                sentence = sentence[found.end() :].strip()
                fields |= read(found)
                break
        else:
            is_slow = "slowly" in fold_case(sentence[-END_WINDOW:])
            found = is_slow and SLOWLY_AT_END.search(sentence, max(0, len(sentence) - END_WINDOW))
            if not found:
                break
            sentence = (sentence[: found.start()] + found[2]).strip()
            fields |= _read_slow(found)
    return Utterance(request, message, sentence, SampleBudget(), **fields)


class Utterance(NamedTuple):
    """The newest user message, as passed to the rules."""

    request: PracticeRequest
    message: str  # as it was written
    sentence: str  # without polite words and without those that set the pace or ask for reasoning
    budget: SampleBudget  # of all values that the answer has
    pace: float = 0.0
    think: bool = False
    invalid: str = ""  # "first" or "always": which answers do not match their schema
    is_corrected: bool = False  # whether the newest message requests the answer again

    @property
    def wants_invalid(self) -> bool:
        """Whether the answer must not match its schema."""
        return self.invalid == "always" or (self.invalid == "first" and not self.is_corrected)


class TextResult(Struct, frozen=True):
    """A text answer; ``value`` is the fact in it, which a JSON answer contains instead of the text."""

    text: str
    value: Any = None
    is_refusal: bool = False


RuleHandler = Callable[[Utterance, "re.Match[str]"], TextResult | tuple[OutputPart, ...] | None]


class PhraseRule(Struct, frozen=True):
    """One phrase: its topic, its pattern, its handler, and whether it may be inside a sentence."""

    description: str
    pattern: re.Pattern[str]
    handler: RuleHandler
    is_searched: bool = False


Handler = TypeVar("Handler", bound=RuleHandler)


class RuleList(list[PhraseRule]):
    """Rules in the order in which they are tried. Its methods are decorators of handlers, applied from below."""

    def prefix(
        self, description: str, pattern: str, *, is_searched: bool = False
    ) -> Callable[[Handler], Handler]:
        """Add a rule for sentences that start with the phrase."""

        def add(handler: Handler) -> Handler:
            self.append(PhraseRule(description, re.compile(pattern, FLAGS), handler, is_searched))
            return handler

        return add

    def search(self, description: str, pattern: str) -> Callable[[Handler], Handler]:
        """Add a rule for sentences that contain the phrase in their last ``SEARCH_WINDOW`` characters.

        The phrase starts with one of the words of ``SEARCH_WORDS``.
        """
        return self.prefix(description, pattern, is_searched=True)


def first_match(
    rules: Sequence[PhraseRule], utterance: Utterance
) -> tuple[TextResult | tuple[OutputPart, ...], str] | None:
    """Try the rules in order, and return the first answer and the topic of its rule."""
    sentence = utterance.sentence
    start = max(0, len(sentence) - SEARCH_WINDOW)
    end = fold_case(sentence[start:])
    has_search_word = SEARCH_WORD.search(end) is not None
    for rule in rules:
        if not rule.is_searched:
            found = rule.pattern.match(sentence)
        else:
            found = has_search_word and rule.pattern.search(sentence, start)
        if found and (response := rule.handler(utterance, found)) is not None:
            return response, rule.description
    return None


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, in plain digits, because programs parse the number."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quote_text(text: str, max_length: int | None = None) -> str:
    """Quote a text, truncated to ``max_length`` characters unless that is None."""
    if max_length is not None and len(text) > max_length:
        text = text[:max_length].rstrip() + "…"
    return f'"{text}"'
