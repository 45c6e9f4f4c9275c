"""How Anthropic's API tells an answer: blocks that open, grow and close, or the whole message."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from kedge.server.errors import ApiError
from kedge.server.messages import refusals
from kedge.server.messages.words import body_of
from kedge.server.models import Closed, Counted, Grown, Opened, Piece, Stopped
from kedge.server.output import Writer
from kedge.server.wire import encode

Event = dict[str, Any]

ENDINGS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}

OPENINGS: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "refusal": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTAS: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "function_call": ("input_json_delta", "partial_json"),
    "custom_tool_call": ("input_json_delta", "partial_json"),
}


class MessageVoice:
    """Tells one message; ``thinks`` says whether thoughts are told, ``shows`` whether in full."""

    def __init__(
        self, id: str, model: str, *, thinks: bool, shows: bool, request_id: str | None
    ) -> None:
        self._frame = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._thinks = thinks
        self._shows = shows
        self._request_id = request_id
        self._kind = ""
        self._index = -1

    def begin(self, input_tokens: int) -> bytes:
        """Open the stream with the empty message."""
        empty: Event = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._frame, **empty, "usage": usage_of(Counted(input_tokens, 1))}
        return framed({"type": "message_start", "message": message}) + framed({"type": "ping"})

    def tell(self, piece: Piece, writer: Writer) -> bytes:
        """Tell of one piece."""
        return b"".join(map(framed, self._events(piece, writer)))

    def _events(self, piece: Piece, writer: Writer) -> Iterator[Event]:
        if isinstance(piece, Opened):
            self._kind = piece.kind if piece.kind != "reasoning" or self._thinks else ""
            if self._kind:
                self._index += 1
                block = _opening(self._kind, writer.items[-1])
                yield self._at("content_block_start", content_block=block)
        elif self._kind and isinstance(piece, Grown):
            if piece.text and (self._shows or self._kind != "reasoning"):
                kind, member = DELTAS[self._kind]
                yield self._at("content_block_delta", delta={"type": kind, member: piece.text})
        elif self._kind and isinstance(piece, Closed | Stopped):
            if self._kind == "reasoning":
                signature = writer.items[-1]["encrypted_content"]
                delta = {"type": "signature_delta", "signature": signature}
                yield self._at("content_block_delta", delta=delta)
            self._kind = ""
            yield self._at("content_block_stop")

    def _at(self, type: str, **members: Any) -> Event:
        return {"type": type, "index": self._index, **members}

    def end(self, writer: Writer, counted: Counted) -> bytes:
        """Say why the answer ended and what it took."""
        delta = {"type": "message_delta", "delta": ending(writer), "usage": usage_of(counted)}
        return framed(delta) + framed({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        """Break the stream off with an error."""
        return framed(body_of(error, self._request_id))

    def whole(self, writer: Writer, counted: Counted) -> Mapping[str, Any]:
        """Give the whole message."""
        content = [block for item in writer.items for block in self._blocks(item)]
        return {
            **self._frame,
            "content": content,
            **ending(writer),
            "usage": usage_of(counted),
        }

    def _blocks(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match item["type"]:
            case "message":
                part = item["content"][0]
                yield {"type": "text", "text": part.get("text") or part.get("refusal", "")}
            case "reasoning":
                if self._thinks:
                    text = "".join(part["text"] for part in item["summary"])
                    signature = item["encrypted_content"]
                    yield {"type": "thinking", "thinking": text, "signature": signature}
            case "function_call":
                yield {**_opening(item["type"], item), "input": _arguments(item)}
            case _:
                pass  # this API has no words for it


def _opening(kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    return OPENINGS.get(kind) or {
        "type": "tool_use",
        "id": item["call_id"],
        "name": item["name"],
        "input": {},
    }


def _arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(item["arguments"] or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise refusals.ARGUMENTS_NOT_OBJECT(name=item["name"])
    return cast("dict[str, Any]", value)


def ending(writer: Writer) -> dict[str, Any]:
    """Say why an answer ended."""
    if writer.reason is not None:
        reason = ENDINGS[writer.reason]
    elif any(item["type"] == "function_call" for item in writer.items):
        reason = "tool_use"
    elif any(
        part["type"] == "refusal" for item in writer.items for part in item.get("content", ())
    ):
        reason = "refusal"
    else:
        reason = "stop_sequence" if writer.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": writer.stop or None}


def usage_of(counted: Counted) -> dict[str, Any]:
    """Say what an answer took; what was read from a cache is counted apart here."""
    return {
        "input_tokens": counted.input - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.output,
    }


def framed(event: Event) -> bytes:
    """Write one event."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
