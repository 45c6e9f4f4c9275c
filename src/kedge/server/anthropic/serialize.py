"""Serialize an answer as a message of Anthropic's API, complete or as events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from kedge.server.anthropic import errors
from kedge.server.anthropic.errors import error_body
from kedge.server.errors import ApiError
from kedge.server.json_codec import encode
from kedge.server.models import (
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ModelUsage,
    OutputEvent,
    OutputTruncated,
)
from kedge.server.output_writer import OutputWriter

MessageEvent = dict[str, Any]

STOP_REASONS = {"max_output_tokens": "max_tokens", "content_filter": "refusal"}

BLOCK_STARTS: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "refusal": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
DELTA_TYPES: Mapping[str, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "refusal": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "function_call": ("input_json_delta", "partial_json"),
    "custom_tool_call": ("input_json_delta", "partial_json"),
}


class MessageSerializer:
    """A serializer of one message.

    ``include_thinking`` includes thinking blocks, ``show_thinking`` their text as well.
    """

    def __init__(
        self,
        id: str,
        model: str,
        *,
        include_thinking: bool,
        show_thinking: bool,
        request_id: str | None,
    ) -> None:
        self._header = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._include_thinking = include_thinking
        self._show_thinking = show_thinking
        self._request_id = request_id
        self._kind = ""
        self._index = -1

    def start(self, usage: ModelUsage) -> bytes:
        """Return the first events, with the empty message."""
        empty: MessageEvent = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._header, **empty, "usage": format_usage(usage)}
        return encode_event({"type": "message_start", "message": message}) + encode_event(
            {"type": "ping"}
        )

    def delta(self, piece: OutputEvent, writer: OutputWriter) -> bytes:
        """Return the events for one output event."""
        return b"".join(map(encode_event, self._iter_events(piece, writer)))

    def _iter_events(self, piece: OutputEvent, writer: OutputWriter) -> Iterator[MessageEvent]:
        if isinstance(piece, ItemOpened):
            self._kind = piece.kind if piece.kind != "reasoning" or self._include_thinking else ""
            if self._kind:
                self._index += 1
                block = _build_block_start(self._kind, writer.items[-1])
                yield self._block_event("content_block_start", content_block=block)
        elif self._kind and isinstance(piece, ItemDelta):
            if piece.text and (self._show_thinking or self._kind != "reasoning"):
                kind, member = DELTA_TYPES[self._kind]
                yield self._block_event(
                    "content_block_delta", delta={"type": kind, member: piece.text}
                )
        elif self._kind and isinstance(piece, ItemClosed | OutputTruncated):
            if self._kind == "reasoning":
                signature = writer.items[-1]["encrypted_content"]
                delta = {"type": "signature_delta", "signature": signature}
                yield self._block_event("content_block_delta", delta=delta)
            self._kind = ""
            yield self._block_event("content_block_stop")

    def _block_event(self, type: str, **members: Any) -> MessageEvent:
        return {"type": type, "index": self._index, **members}

    def end(self, writer: OutputWriter, usage: ModelUsage) -> bytes:
        """Return the last events, with the stop reason and the usage."""
        delta = {
            "type": "message_delta",
            "delta": format_stop(writer),
            "usage": format_usage(usage),
        }
        return encode_event(delta) + encode_event({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        """Return the event that ends the stream with an error."""
        return encode_event(error_body(error, self._request_id))

    def response(self, writer: OutputWriter, usage: ModelUsage) -> Mapping[str, Any]:
        """Return the complete message."""
        content = [block for item in writer.items for block in self._iter_blocks(item)]
        return {
            **self._header,
            "content": content,
            **format_stop(writer),
            "usage": format_usage(usage),
        }

    def _iter_blocks(self, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match item["type"]:
            case "message":
                part = item["content"][0]
                yield {"type": "text", "text": part.get("text") or part.get("refusal", "")}
            case "reasoning":
                if self._include_thinking:
                    text = "".join(part["text"] for part in item["summary"])
                    signature = item["encrypted_content"]
                    yield {"type": "thinking", "thinking": text, "signature": signature}
            case "function_call":
                yield {**_build_block_start(item["type"], item), "input": _parse_arguments(item)}
            case _:
                pass  # this API has no such block


def _build_block_start(kind: str, item: Mapping[str, Any]) -> Mapping[str, Any]:
    return BLOCK_STARTS.get(kind) or {
        "type": "tool_use",
        "id": item["call_id"],
        "name": item["name"],
        "input": {},
    }


def _parse_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(item["arguments"] or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise errors.ARGUMENTS_NOT_OBJECT(name=item["name"])
    return cast("dict[str, Any]", value)


def format_stop(writer: OutputWriter) -> dict[str, Any]:
    """Return the stop reason and the stop sequence."""
    if writer.incomplete_reason is not None:
        reason = STOP_REASONS[writer.incomplete_reason]
    elif any(item["type"] == "function_call" for item in writer.items):
        reason = "tool_use"
    elif any(
        part["type"] == "refusal" for item in writer.items for part in item.get("content", ())
    ):
        reason = "refusal"
    else:
        reason = "stop_sequence" if writer.stop_sequence else "end_turn"
    return {"stop_reason": reason, "stop_sequence": writer.stop_sequence or None}


def format_usage(usage: ModelUsage) -> dict[str, Any]:
    """Format the token usage; this API counts cached input separately."""
    return {
        "input_tokens": usage.input - usage.cached - usage.cache_write,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def encode_event(event: MessageEvent) -> bytes:
    """Encode one event."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
