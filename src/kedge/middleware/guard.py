"""``guard``: redact or block content that matches a rule.

Redaction changes the Turn itself: redacted content is neither sent again nor stored, and no response or
reasoning derived from it is reused. With rules for output, text is held back until the answer is complete,
so that nothing is shown that would be redacted later.

The rules do not depend on the position of a guard. Content is added to a Turn at many positions (tool results
inside a guard, a system prompt, a summary, a stored block), so a guard publishes its rules as a content
filter, which other components apply: see ``kedge.turns.content_filters``. The position decides which
middleware receives content before redaction: a tool inside a guard is called with the arguments as the model
wrote them, a tool outside of it with the redacted ones.

All text is searched, also inside items that Kedge does not know and in the metadata of blocks. Content that
cannot be read is not: what a provider encrypted, images, and the contents of files. Identifiers are not searched
either (names of tools, ids, names of JSON members that look like those of an API): edited ones would break the
requests that carry them.

A rule that fails lets nothing pass: the block is blocked.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any, Literal, TypeVar, cast, get_args

from msgspec import structs

from kedge import turns
from kedge._internal.arguments import check_choice, check_type
from kedge.engines.base import Events, Middleware
from kedge.engines.request import Request
from kedge.engines.stack import BaseMiddleware
from kedge.errors import Blocked, EngineError, InvalidSetting
from kedge.events import (
    AnomalyNoted,
    Event,
    ItemStarted,
    ResponseStarted,
    StreamEvent,
    ToolCallCompleted,
    ToolCallStarted,
)
from kedge.events.run import AnswerFinished, ToolFinished, ToolStarted, TurnFinished
from kedge.events.types import build_delta
from kedge.planning import RequestPlan
from kedge.turns import Block, FrozenMap, RefusalPart, TextPart, Turn
from kedge.turns.attachments import AUDIO_FORMATS
from kedge.turns.content_filters import ContentFilter, ContentFilters, Phase
from kedge.turns.parts import PartBase

Direction = Literal["in", "out", "both"]
TextEdit = Callable[[str], str]
B = TypeVar("B", bound=Block)

ENCRYPTED_CONTENT = "encrypted_content"
_STRUCTURAL_FIELDS = frozenset({"type", "id", "call_id", "status", "role", ENCRYPTED_CONTENT})
"""Members of an item that hold no text, or text that only the provider can read."""
_MEMBER_NAME = re.compile(r"[a-z][a-z0-9_]*")
"""The form of a member's name in the items of providers; any other name may be content, such as an address."""
_REDACTED = "[redacted]"
_CONTENT_FREE_EVENTS = (ResponseStarted, ItemStarted, ToolCallStarted, AnomalyNoted)
"""Events of a stream without content, which are not held back."""
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*+)("?)', re.DOTALL)
"""A string of JSON. Its end may be missing: otherwise the search would start again at each quote in it."""
_LENIENT_JSON = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class GuardRule:
    """One rule: the text to match, the direction, and whether to edit or to block.

    Attributes:
        name: The name of the rule, for ``Blocked``.
        edit: A function that returns the redacted text; the rule matches if the text changed.
        direction: ``"in"``, ``"out"`` or ``"both"``.
        block: Raise ``Blocked`` instead of editing.

    Raises:
        InvalidSetting: ``edit`` is not a function, or there is no such direction.
    """

    name: str
    edit: TextEdit
    direction: Direction = "both"
    block: bool = False

    def __post_init__(self) -> None:
        if not callable(self.edit):
            raise InvalidSetting("edit of a guard rule must be a function of a text")
        check_choice("direction of a guard rule", self.direction, get_args(Direction))


CARD_NUMBER = r"(?<!\d)(?:\d[ \u00a0\u2010\u2011\u2013-]?){12,18}\d(?!\d)"
"""Matches card numbers: 13 to 19 digits, also in groups with spaces or dashes. It also matches other long numbers."""


def redact(
    pattern: str, replacement: str = _REDACTED, *, name: str = "", direction: Direction = "both"
) -> GuardRule:
    """Create a rule that replaces text.

    Args:
        pattern: A regular expression, such as ``CARD_NUMBER``.
        replacement: The replacement, as for ``re.sub``.
        name: The name of the rule; by default its pattern.
        direction: ``"in"`` for content that is sent to the model, ``"out"`` for content from the model,
            or ``"both"``. Results of tools are subject to the rules of both directions.

    Returns:
        A rule for ``guard``.

    Raises:
        InvalidSetting: The pattern, the replacement or the direction is invalid.
    """
    try:
        compiled = re.compile(pattern)
        if not callable(replacement):
            compiled.sub(replacement, "")  # which parses it
    except (re.error, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise InvalidSetting(
            f"a guard rule needs a valid regular expression and replacement: {error}; "
            "re.escape(text) makes a pattern of plain text"
        ) from error
    check_type("name", str, name)
    name = name or compiled.pattern
    return GuardRule(name, lambda text: compiled.sub(replacement, text), direction)


def block(pattern: str, *, name: str = "", direction: Direction = "both") -> GuardRule:
    """Create a rule that stops a Turn with ``Blocked``.

    Args:
        pattern: A regular expression.
        name: The name of the rule, which is part of the error; by default its pattern.
        direction: As for ``redact``.

    Returns:
        A rule for ``guard``.

    Raises:
        InvalidSetting: The pattern or the direction is invalid.
    """
    return replace(redact(pattern, "", name=name, direction=direction), block=True)


def guard(*rules: GuardRule) -> Middleware:
    """Apply rules to all text that is sent, shown or stored, at any position in a stack.

    Args:
        *rules: Rules created with ``redact`` and ``block``, or ``GuardRule`` with a custom function.

    Returns:
        A middleware for ``with_middleware``, ``Chat`` and ``Conversation``.

    Raises:
        InvalidSetting: An argument is not a rule.

    Example:
        ```python
        Chat(engine, middleware=[guard(redact(r"sk-[a-z0-9]+"))], tools=[read_file])
        ```
    """
    for rule in rules:
        if not isinstance(rule, GuardRule):  # pyright: ignore[reportUnnecessaryIsInstance]
            remedy = "call it as guard(redact(…), block(…))"
            raise InvalidSetting(f"the arguments of guard must be rules; {remedy}")
    content_filter = _RuleFilter(rules)

    return lambda engine: _GuardMiddleware(engine, content_filter)


class _RuleFilter:
    """The rules of one guard, as a content filter."""

    def __init__(self, rules: tuple[GuardRule, ...]) -> None:
        self.rules: dict[Phase, tuple[GuardRule, ...]] = {
            "input": tuple(rule for rule in rules if rule.direction in ("in", "both")),
            "output": tuple(rule for rule in rules if rule.direction in ("out", "both")),
        }
        self.all_rules = rules

    @property
    def holds_output(self) -> bool:
        """Whether there are rules for output."""
        return bool(self.rules["output"])

    def filter_block(self, block: Block, phase: Phase) -> Block:
        """Apply the rules of a phase to one block.

        Raises:
            Blocked: A rule that blocks matches, or a rule fails.
        """
        for rule in self.rules[phase]:
            try:
                changed = _edit_block(block, partial(_edit_text, edit=rule.edit))
            except Exception as error:
                failure = f"the rule itself failed ({type(error).__name__})"
                raise Blocked(rule.name, f"a {block.kind} block: {failure}") from error
            if changed is not block and rule.block:
                raise Blocked(rule.name, f"a {block.kind} block")
            block = changed
        return block

    def edit_text(self, text: str) -> str:
        """Remove from a text what any rule matches; all of it if a rule fails."""
        for rule in self.all_rules:
            try:
                text = _edit_text(text, rule.edit)
            except Exception:  # noqa: BLE001 - the caller's function
                return _REDACTED
        return text


@dataclass(eq=False, repr=False)
class _GuardMiddleware(BaseMiddleware):
    name = "guard"
    rules: _RuleFilter

    @property
    def content_filters(self) -> tuple[ContentFilter, ...]:
        """The rules, for every component of the stack that sends or stores content."""
        return (self.rules,)

    def enter(self, turn: Turn) -> Turn:
        """Apply the rules for input."""
        return turn.with_blocks(self.rules.filter_block(each, "input") for each in turn.blocks)

    def plan(self, turn: Turn, **options: Any) -> RequestPlan:
        """Return the plan of the Turn after the rules, which the engine applies to the system text of the run."""
        filters = (*options.pop("filters", ()), self.rules)
        return super().plan(turn, **options, filters=filters)

    async def events(self, turn: Turn, request: Request) -> Events:
        """Yield the inner engine's events; with rules for output, text only when it is complete."""
        filters = request.filters.with_filter(self.rules)
        request = structs.replace(request, filters=filters, applied=(*request.applied, self.rules))
        turn = filters.apply_to_turn(turn, ("input",), (self.rules,))
        output_guard = _OutputGuard(filters, self.rules)
        is_held = self.rules.holds_output
        try:
            async with aclosing(self.inner.events(turn, request)) as events:
                async for event in events:
                    if not is_held:
                        yield event
                        continue
                    for filtered in output_guard.filter_event(event):
                        yield filtered
        except EngineError as error:
            output_guard.filter_error(error)
            raise


class _OutputGuard:
    """Applies the rules for output to the events and errors of one run."""

    def __init__(self, filters: ContentFilters, rules: _RuleFilter) -> None:
        self.filters = filters
        self.rules = (rules,)

    def filter_event(self, event: Event) -> Iterable[Event]:
        """Return the events to emit instead of an event."""
        match event:
            case TurnFinished():
                return (TurnFinished(self._turn(event.turn)),)
            case AnswerFinished():
                return self._replay_answer(event)
            case ToolStarted():
                return (structs.replace(event, call=self._block(event.call)),)
            case ToolFinished():
                call = self._block(event.call)
                return (structs.replace(event, call=call, result=self._block(event.result)),)
            case _ if isinstance(event, StreamEvent) and not isinstance(
                event, _CONTENT_FREE_EVENTS
            ):
                return ()  # its content follows with the complete answer
            case _:
                return (event,)

    def filter_error(self, error: EngineError) -> None:
        """Apply the rules to the content of an error."""
        if error.turn is not None:
            error.turn = self._turn(error.turn)
        error.partial = tuple(map(self._block, error.partial))

    def _replay_answer(self, event: AnswerFinished) -> Iterable[Event]:
        blocks = tuple(map(self._block, event.outcome.blocks))
        for block in blocks:
            yield from _replay_block(block)
        outcome = structs.replace(event.outcome, blocks=blocks)
        yield structs.replace(event, outcome=outcome, turn=self._turn(event.turn))

    def _block(self, block: B) -> B:
        return self.filters.apply(block, ("output",), self.rules)

    def _turn(self, turn: Turn) -> Turn:
        return self.filters.apply_to_turn(turn, ("output",), self.rules)


def _replay_block(block: Block) -> Iterator[Event]:
    """Yield events in place of those that were held back, each with the complete text."""
    item_id = block.item_id
    output_index = -1
    if block.output_index is not None:
        output_index = block.output_index
    match block:
        case turns.AssistantBlock():
            for index, part in enumerate(block.parts):
                if isinstance(part, TextPart | RefusalPart) and part.text:
                    kind = "text" if isinstance(part, TextPart) else "refusal"
                    logprobs = _get_logprobs(part)
                    yield build_delta(kind, part.text, item_id, output_index, index, logprobs)
        case turns.ReasoningBlock():
            for index, text in enumerate(block.summary):
                yield build_delta("summary", text, item_id, output_index, index)
            for index, text in enumerate(block.texts):
                yield build_delta("reasoning", text, item_id, output_index, index)
        case turns.ToolCallBlock():
            yield ToolCallCompleted(
                block.call_id, block.name, block.arguments, item_id, output_index, block.custom
            )
        case _:
            pass


def _get_logprobs(part: TextPart | RefusalPart) -> tuple[FrozenMap, ...]:
    logprobs = part.extra.get("logprobs")
    if not isinstance(logprobs, tuple):
        return ()
    entries = cast("tuple[object, ...]", logprobs)
    return tuple(entry for entry in entries if isinstance(entry, FrozenMap))


def _edit_text(text: str, edit: TextEdit) -> str:
    r"""Return the edited text; in JSON strings, escapes such as ``M\u00fcller`` or line breaks are decoded first.

    Arguments of calls and results of tools are often JSON, which a model or ``json.dumps`` wrote with
    escapes, and may be cut off. Text outside of an edited string is not changed.
    """
    edited = edit(text)
    if not isinstance(edited, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a guard rule returns a text, not {type(edited).__name__}")
    if "\\" not in edited:
        return edited
    return _JSON_STRING.sub(lambda match: _edit_literal(match, edit), edited)


def _edit_literal(match: re.Match[str], edit: TextEdit) -> str:
    """Return a string of JSON, edited if a rule matches its value."""
    content, end = match.groups()
    if "\\" not in content:
        return match[0]
    try:
        value = _LENIENT_JSON.decode(f'"{content}"')
    except ValueError:
        return match[0]
    changed = _edit_text(value, edit)  # a string may contain JSON again
    if changed == value:
        return match[0]
    return json.dumps(changed)[:-1] + end


_TEXT_FIELDS = (
    "text", "parts", "arguments", "item", "form", "summary", "texts", "content", "filename", "url",
    "extra",
)  # fmt: skip
"""The fields of blocks and parts that hold text."""


def _edit_block(block: Block, edit: TextEdit) -> Block:
    """Return the block with every text edited; the identical block if nothing changed."""
    changed = _edit_fields(block, edit)
    metadata = _edit_metadata(changed.metadata, edit)
    if metadata is changed.metadata:
        return changed
    return structs.replace(changed, metadata=metadata)


def _edit_metadata(metadata: FrozenMap, edit: TextEdit) -> FrozenMap:
    """Return the metadata with its texts edited, except for ids and what Kedge itself sets."""
    searched = {
        name: value
        for name, value in metadata.items()
        if not name.startswith("kedge.") and not name.endswith("_id")
    }
    edited = _edit_value(searched, edit)
    if edited is searched:
        return metadata
    return FrozenMap({**{n: v for n, v in metadata.items() if n not in searched}, **edited})


def _edit_fields(value: Any, edit: TextEdit) -> Any:
    """Return a block or a part with its texts edited; the identical one if nothing changed."""
    names = (name for name in _TEXT_FIELDS if name in value.__struct_fields__)
    fields = {name: getattr(value, name) for name in names}
    edited: dict[str, Any] = {}
    for name, field in fields.items():
        edited[name] = field
        if name != "url" or not field.startswith("data:"):
            edited[name] = _edit_value(field, edit)
    if _all_identical(edited.values(), fields.values()):
        return value
    match value:
        case TextPart() | RefusalPart():
            return type(value)(edited["text"])  # annotations and similar data refer to the old text
        case turns.ReasoningBlock():
            return turns.ReasoningBlock(id=value.id)
        case turns.ImagePart() | turns.FilePart() if edited["url"] != value.url:
            return TextPart(edited["url"])  # no server could load it
        case turns.OpaqueBlock() if edited["item"] is not value.item:
            # The encrypted content may contain the edited text.
            item = {k: v for k, v in edited["item"].items() if k != ENCRYPTED_CONTENT}
            return structs.replace(value, item=FrozenMap(item), extra=edited["extra"])
        case _:
            return structs.replace(value, **edited)


def _edit_value(value: Any, edit: TextEdit) -> Any:
    """Return a JSON value or a part with its texts edited; the identical value if nothing changed."""
    match value:
        case str():
            text = edit(value)
            return value if text == value else text
        case Mapping():
            return _edit_mapping(cast("Mapping[str, Any]", value), edit)
        case tuple():
            entries = cast("tuple[Any, ...]", value)
            edited = tuple(_edit_value(entry, edit) for entry in entries)
            return entries if _all_identical(edited, entries) else edited
        case PartBase():
            return _edit_fields(value, edit)
        case _:
            return value


def _edit_mapping(mapping: Mapping[str, Any], edit: TextEdit) -> Mapping[str, Any]:
    """Return an object with the names and texts of its members edited; the identical one if nothing changed."""
    if set(mapping) == {"data", "format"} and mapping["format"] in AUDIO_FORMATS.values():
        return mapping  # base64, in which a rule would match by chance
    members: dict[str, Any] = {}
    for name, member in mapping.items():
        edited_name = _edit_name(name, edit, (mapping, members))
        if name in _STRUCTURAL_FIELDS:
            members[edited_name] = member
        else:
            members[edited_name] = _edit_value(member, edit)
    has_same_names = members.keys() == mapping.keys()
    if has_same_names and _all_identical(members.values(), mapping.values()):
        return mapping
    return FrozenMap(members)


def _edit_name(name: str, edit: TextEdit, used: Iterable[Container[str]]) -> str:
    """Return the edited name of a member, distinct from those used; names of an API are unchanged."""
    if _MEMBER_NAME.fullmatch(name):
        return name
    edited = edit(name)
    while edited != name and any(edited in names for names in used):
        edited += "_"
    return edited


def _all_identical(left: Iterable[object], right: Iterable[object]) -> bool:
    return all(map(is_, left, right))
