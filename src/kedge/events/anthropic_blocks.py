"""Content blocks of the Messages API as they grow, and the items of output that they become.

Text becomes a message, a thought a reasoning item (its signature is what seals it), a tool use a call. A
block of any other kind is an item of its own, kept as it came.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from kedge.events import reading
from kedge.events.call import CallSeen
from kedge.events.calls import ToolCallState
from kedge.events.decoder import Found
from kedge.events.reading import Members
from kedge.events.surrogates import mended
from kedge.events.types import AnomalyNoted, ItemCompleted

NATIVE = "anthropic"
"""The member of an item that keeps what only this API knows of it."""
REDACTED = "redacted"
"""What that member says of a thought that nobody may read."""
_TYPES = {"text": "message", "thinking": "reasoning", "redacted_thinking": "reasoning"}
_OF_CALLS = frozenset({"type", "id", "name", "input"})


@dataclass(slots=True)
class Growing:
    """One content block as it grows."""

    block: Members
    place: int
    item_id: str
    pieces: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    stopped: bool = False
    whole: bool = False
    """Whether it was told to be finished."""

    @property
    def type(self) -> str:
        """The API's name for this kind of block."""
        return reading.word(self.block, "type")

    @property
    def item_type(self) -> str:
        """The type of the item that it becomes."""
        return _TYPES.get(self.type, self.type)

    def add(self, name: str, piece: str) -> None:
        """Some more of one of its texts."""
        self.pieces.setdefault(name, []).append(piece)

    def join(self, name: str, value: Any) -> None:
        """Some more of any of its members."""
        there = self.block.get(name)
        if isinstance(there, str) and isinstance(value, str):
            self.block[name] = there + value
        elif isinstance(there, list) and isinstance(value, list):
            self.block[name] = [*cast("list[Any]", there), *cast("list[Any]", value)]
        else:
            self.block[name] = value

    def text(self, name: str) -> str:
        """One of its texts: what it began with, and what was added."""
        return mended(reading.word(self.block, name) + "".join(self.pieces.get(name, ())))


def finished(growing: Growing, calls: ToolCallState) -> Found:
    """What to tell of a block that is whole."""
    if growing.type == "tool_use":
        return _finished_call(growing, calls)
    item = _ITEMS.get(growing.type, _native)(growing)
    identity = {"id": growing.item_id} if growing.type in _ITEMS and growing.item_id else {}
    return [ItemCompleted({**item, **identity}, growing.place)]


def _finished_call(growing: Growing, calls: ToolCallState) -> Found:
    block, arguments = growing.block, growing.text("input")
    if not arguments.strip():
        given = block.get("input")
        arguments = json.dumps({} if given is None else given, ensure_ascii=False)
    call_id, name = block.get("id"), reading.word(block, "name")
    seen = CallSeen(call_id, name, growing.item_id, growing.place, arguments=arguments)
    call, events = calls.finished(seen)
    if not call.name:
        return [*events, AnomalyNoted("malformed", "a tool call without a name")]
    item: Members = {
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        **({"id": growing.item_id} if growing.item_id else {}),
    }
    rest = {k: v for k, v in block.items() if k not in _OF_CALLS and v is not None}
    if rest.get("caller") == {"type": "direct"}:
        del rest["caller"]
    return [*events, ItemCompleted({**item, **({NATIVE: rest} if rest else {})}, growing.place)]


def _message_item(growing: Growing) -> Members:
    part: Members = {"type": "output_text", "text": growing.text("text")}
    if growing.block.get("citations"):
        part["citations"] = growing.block["citations"]
    return {"type": "message", "role": "assistant", "content": [part]}


def _reasoning_item(growing: Growing) -> Members:
    thought = growing.text("thinking")
    item: Members = {"type": "reasoning", "summary": []}
    if thought:
        item["content"] = [{"type": "reasoning_text", "text": thought}]
    return {**item, "encrypted_content": reading.word(growing.block, "signature")}


def _redacted_item(growing: Growing) -> Members:
    sealed = reading.word(growing.block, "data")
    return {"type": "reasoning", "summary": [], "encrypted_content": sealed, NATIVE: REDACTED}


def _native(growing: Growing) -> Members:
    """A block of a kind that only this API knows, whole."""
    written = growing.text("input") if growing.pieces else ""
    try:
        given = {"input": json.loads(written)} if written.strip() else {}
    except ValueError:
        given = {"input": written}
    return mended({**growing.block, **given})


_ITEMS: dict[str, Callable[[Growing], Members]] = {
    "text": _message_item,
    "thinking": _reasoning_item,
    "redacted_thinking": _redacted_item,
}
