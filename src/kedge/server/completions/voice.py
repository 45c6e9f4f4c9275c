"""How Chat Completions tells an answer: chunks of one choice, or the whole completion.

Thoughts are told as ``reasoning_content``, which is no part of OpenAI's API but what every open
server that thinks aloud has agreed on.
"""

from collections.abc import Mapping
from typing import Any

from kedge.server.errors import ApiError
from kedge.server.models import Counted, Grown, Opened, Piece
from kedge.server.output import Writer
from kedge.server.sse import DONE
from kedge.server.wire import encode

DELTAS: Mapping[str, str] = {
    "text": "content",
    "refusal": "refusal",
    "reasoning": "reasoning_content",
}
"""The member of a delta, or of a message, that holds the text of this kind of item."""

CALLS: Mapping[str, tuple[str, str]] = {
    "function_call": ("function", "arguments"),
    "custom_tool_call": ("custom", "input"),
}
"""For each type of call: its name here, and the member that holds its text."""

ENDINGS = {"max_output_tokens": "length", "content_filter": "content_filter"}


class ChatVoice:
    """Tells one completion. ``usage`` says whether a stream ends with its usage."""

    def __init__(self, id: str, model: str, created: int, *, usage: bool) -> None:
        self._frame = {"id": id, "created": created, "model": model}
        self._frame |= {"service_tier": "default", "system_fingerprint": None}
        self._usage = usage
        self._kind = "text"
        self._call = -1

    def begin(self, input_tokens: int) -> bytes:
        """Open the stream with the role."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None})

    def tell(self, piece: Piece, writer: Writer) -> bytes:
        """Tell of a call that begins, and of everything that grows."""
        if isinstance(piece, Opened):
            self._kind = piece.kind
            return self._opening(writer.items[-1]) if piece.kind in CALLS else b""
        if isinstance(piece, Grown) and piece.text:
            return self._chunk(self._grown(piece.text))
        return b""

    def _opening(self, item: Mapping[str, Any]) -> bytes:
        self._call += 1
        kind, member = CALLS[item["type"]]
        call = {"index": self._call, "id": item["call_id"], "type": kind}
        call[kind] = {"name": item["name"], member: ""}
        return self._chunk({"tool_calls": [call]})

    def _grown(self, text: str) -> dict[str, Any]:
        if self._kind not in CALLS:
            return {DELTAS[self._kind]: text}
        kind, member = CALLS[self._kind]
        return {"tool_calls": [{"index": self._call, kind: {member: text}}]}

    def end(self, writer: Writer, counted: Counted) -> bytes:
        """Say why the answer ended, and what it took if that was asked for."""
        ended = self._chunk({}, finish_reason(writer))
        if self._usage:
            ended += self._framed({"choices": [], "usage": usage_of(counted)})
        return ended + DONE

    def fail(self, error: ApiError) -> bytes:
        """Break the stream off with an error."""
        return b"data: %b\n\n%b" % (encode(error.body()), DONE)

    def whole(self, writer: Writer, counted: Counted) -> Mapping[str, Any]:
        """Give the whole completion."""
        choice = {
            "index": 0,
            "message": message_of(writer),
            "logprobs": None,
            "finish_reason": finish_reason(writer),
        }
        frame = {**self._frame, "object": "chat.completion"}
        return {**frame, "choices": [choice], "usage": usage_of(counted)}

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._framed({"choices": [choice], **({"usage": None} if self._usage else {})})

    def _framed(self, members: Mapping[str, Any]) -> bytes:
        chunk = {**self._frame, "object": "chat.completion.chunk", **members}
        return b"data: %b\n\n" % encode(chunk)


def finish_reason(writer: Writer) -> str:
    """Say why an answer ended."""
    if writer.reason is not None:
        return ENDINGS[writer.reason]
    called = any(item["type"] in CALLS for item in writer.items)
    return "tool_calls" if called else "stop"


def message_of(writer: Writer) -> dict[str, Any]:
    """Put the written items together as one message."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    for item in writer.items:
        if item["type"] == "message":
            part = item["content"][0]
            member = "refusal" if part["type"] == "refusal" else "content"
            message[member] = (message[member] or "") + (
                part.get("text") or part.get("refusal", "")
            )
        elif item["type"] == "reasoning":
            text = "".join(part["text"] for part in item["summary"])
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif item["type"] in CALLS:
            kind, member = CALLS[item["type"]]
            call = {"id": item["call_id"], "type": kind}
            calls.append(call | {kind: {"name": item["name"], member: item[member]}})
    message["annotations"] = []
    return message | ({"tool_calls": calls} if calls else {})


def usage_of(counted: Counted) -> dict[str, Any]:
    """Say what an answer took."""
    return {
        "prompt_tokens": counted.input,
        "completion_tokens": counted.output,
        "total_tokens": counted.input + counted.output,
        "prompt_tokens_details": {"cached_tokens": counted.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": counted.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
