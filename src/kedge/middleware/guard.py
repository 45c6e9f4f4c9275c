"""``guard``: redacts or blocks what matches a rule, on the way in and on the way out.

Redaction changes the Turn itself: what was redacted is neither sent again nor kept, and no response or
reasoning made from it is built upon. With rules for the way out, text is held back until
the answer is whole, so that nothing is shown that would be redacted a moment later.

All words are looked at, also those inside items that Kedge does not know. What nobody here can read is
not: what a provider sealed, pictures, and the contents of files.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Literal, TypeVar, cast

from kedge.engines.base import Engine, Events, Middleware, Request
from kedge.errors import Blocked, EngineError
from kedge.events import (
    AnomalyNoted,
    Event,
    ItemStarted,
    ResponseStarted,
    StreamEvent,
    TextDelta,
    ToolCallStarted,
)
from kedge.events.run import AnswerFinished, ToolFinished, ToolStarted, TurnFinished
from kedge.middleware.base import BaseMiddleware
from kedge.turns import (
    AssistantBlock,
    Block,
    FilePart,
    FrozenMap,
    ImagePart,
    OpaqueBlock,
    OpaquePart,
    Part,
    ReasoningBlock,
    RefusalPart,
    SystemBlock,
    TextPart,
    ToolCallBlock,
    ToolResultBlock,
    Turn,
    UnknownBlock,
    UserBlock,
)

Direction = Literal["in", "out", "both"]
TextEdit = Callable[[str], str]
B = TypeVar("B", bound=Block)

ENCRYPTED_CONTENT = "encrypted_content"
_STRUCTURAL_FIELDS = frozenset({"type", "id", "call_id", "status", "role", ENCRYPTED_CONTENT})
"""Members of an item that hold no words, or words that nobody but the provider can read."""
_CONTENT_FREE_EVENTS = (ResponseStarted, ItemStarted, ToolCallStarted, AnomalyNoted)
"""The stream's events that hold no content and need not be held back."""


@dataclass(frozen=True, slots=True)
class GuardRule:
    """One rule: what to look for, where, and what to do about it."""

    name: str
    edit: TextEdit
    """Returns the text as it may stay; a text that comes back changed has matched."""
    direction: Direction = "both"
    block: bool = False
    """Stop the Turn instead of editing it."""


def redact(
    pattern: str, replacement: str = "[redacted]", *, name: str = "", direction: Direction = "both"
) -> GuardRule:
    """Replace what matches a regular expression."""
    compiled = re.compile(pattern)
    return GuardRule(name or pattern, lambda text: compiled.sub(replacement, text), direction)


def block(pattern: str, *, name: str = "", direction: Direction = "both") -> GuardRule:
    """Stop a Turn in which something matches a regular expression."""
    compiled = re.compile(pattern)
    return GuardRule(name or pattern, lambda text: compiled.sub("", text), direction, block=True)


def guard(*rules: GuardRule) -> Middleware:
    """Apply rules (see ``redact``, ``block`` and ``Rule``) to all text that passes."""
    way_in = tuple(rule for rule in rules if rule.direction in ("in", "both"))
    way_out = tuple(rule for rule in rules if rule.direction in ("out", "both"))

    def wrap(engine: Engine) -> Engine:
        return _GuardMiddleware(engine, way_in, way_out)

    return wrap


class _GuardMiddleware(BaseMiddleware):
    name = "guard"

    def __init__(
        self, inner: Engine, input_rules: tuple[GuardRule, ...], output_rules: tuple[GuardRule, ...]
    ) -> None:
        super().__init__(inner)
        self.input_rules, self.output_rules = input_rules, output_rules

    def enter(self, turn: Turn) -> Turn:
        """Apply the rules for the way in."""
        return apply_rules(turn, self.input_rules)

    def leave(self, turn: Turn) -> Turn:
        """Apply the rules for the way out."""
        return apply_rules(turn, self.output_rules)

    async def events(self, turn: Turn, request: Request) -> Events:
        """The inner engine's events; with rules for the way out, text only when it is whole."""
        try:
            async with aclosing(self.inner.events(self.enter(turn), request)) as events:
                async for event in events:
                    match event:
                        case TurnFinished():
                            yield TurnFinished(self.leave(event.turn))
                        case AnswerFinished() if self.output_rules:
                            for told in self._replay_answer(event):
                                yield told
                        case ToolStarted() | ToolFinished() if self.output_rules:
                            yield self._guard_tool_event(event)
                        case _ if self.output_rules and _has_content(event):
                            pass
                        case _:
                            yield event
        except EngineError as error:
            error.turn = self.leave(error.turn) if error.turn else None
            error.partial = tuple(_guard_block(each, self.output_rules) for each in error.partial)
            raise

    def _guard_tool_event(self, event: ToolStarted | ToolFinished) -> Event:
        call = _guard_block(event.call, self.output_rules)
        if isinstance(event, ToolStarted):
            return replace(event, call=call)
        return replace(event, call=call, result=_guard_block(event.result, self.output_rules))

    def _replay_answer(self, event: AnswerFinished) -> Iterable[TextDelta | AnswerFinished]:
        blocks = tuple(_guard_block(each, self.output_rules) for each in event.outcome.blocks)
        for each in blocks:
            if isinstance(each, AssistantBlock) and each.text:
                yield TextDelta(each.text, each.item_id)
        outcome = replace(event.outcome, blocks=blocks)
        yield replace(event, outcome=outcome, turn=self.leave(event.turn))


def apply_rules(turn: Turn, rules: tuple[GuardRule, ...]) -> Turn:
    """The Turn with the rules applied to every text in it; raises ``Blocked``."""
    return turn.with_blocks(_guard_block(each, rules) for each in turn.blocks) if rules else turn


def _has_content(event: object) -> bool:
    return isinstance(event, StreamEvent) and not isinstance(event, _CONTENT_FREE_EVENTS)


def _guard_block(each: B, rules: tuple[GuardRule, ...]) -> B:
    for rule in rules:
        changed = cast("B", _edit_block(each, rule.edit))  # a block stays what it is
        if changed is not each:
            if rule.block:
                raise Blocked(rule.name, f"a {each.kind} block")
            each = changed
    return each


def _edit_block(each: Block, edit: TextEdit) -> Block:
    """The block with every text in it edited; the very same block if nothing changed."""
    changed = _edit_block_content(each, edit)
    extra = _edit_json(changed.extra, edit)
    return changed if extra is changed.extra else replace(changed, extra=extra)


def _edit_block_content(each: Block, edit: TextEdit) -> Block:
    match each:
        case UserBlock() | ToolResultBlock():
            parts = tuple(_edit_part(part, edit) for part in each.parts)
            return each if _all_identical(parts, each.parts) else replace(each, parts=parts)
        case AssistantBlock():
            spoken = tuple(_edit_part(part, edit) for part in each.parts)
            return each if _all_identical(spoken, each.parts) else replace(each, parts=spoken)  # pyright: ignore[reportArgumentType]
        case SystemBlock():
            text = edit(each.text)
            return each if text == each.text else replace(each, text=text)
        case ToolCallBlock():
            arguments = edit(each.arguments)
            return each if arguments == each.arguments else replace(each, arguments=arguments)
        case ReasoningBlock():
            shown = (*each.summary, *each.texts, each.extra)
            same = all(_edit_json(told, edit) is told for told in shown)
            return each if same else ReasoningBlock(id=each.id)
        case OpaqueBlock():
            item = _edit_json(each.item, edit)
            return each if item is each.item else replace(each, item=_drop_encrypted(item))
        case UnknownBlock():
            form = _edit_json(each.form, edit)
            return each if form is each.form else replace(each, form=form)
        case _:
            return each


def _edit_part(part: Part, edit: TextEdit) -> Part:
    match part:
        case TextPart() | RefusalPart():
            text = edit(part.text)
            # Annotations and the like speak of the text as it was.
            same = text == part.text and _edit_json(part.extra, edit) is part.extra
            return part if same else type(part)(text)
        case OpaquePart():
            content = _edit_json(part.content, edit)
            return part if content is part.content else OpaquePart(content)
        case FilePart():
            name = edit(part.filename)
            return part if name == part.filename else replace(part, filename=name)
        case ImagePart():
            return part


def _edit_json(value: Any, edit: TextEdit) -> Any:
    """A JSON value with the texts inside edited; the very same value if nothing changed."""
    match value:
        case str():
            text = edit(value)
            return value if text == value else text
        case Mapping():
            given = cast("Mapping[str, Any]", value)
            members = {
                name: member if name in _STRUCTURAL_FIELDS else _edit_json(member, edit)
                for name, member in given.items()
            }
            return given if _all_identical(members.values(), given.values()) else FrozenMap(members)
        case tuple():
            listed = cast("tuple[Any, ...]", value)
            told = tuple(_edit_json(each, edit) for each in listed)
            return listed if _all_identical(told, listed) else told
        case _:
            return value


def _drop_encrypted(item: FrozenMap) -> FrozenMap:
    """The item without what is sealed in it: that may hold what was edited outside of it."""
    return FrozenMap({name: each for name, each in item.items() if name != ENCRYPTED_CONTENT})


def _all_identical(left: Iterable[object], right: Iterable[object]) -> bool:
    return all(map(is_, left, right))
