"""Recorded transcripts, and helpers to build, decode and replay streams."""

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openai.types.responses import ResponsesServerEvent, ResponseStreamEvent

from kedge.events import Outcome, StreamEvent
from kedge.wire import Assembler, ResponsesDecoder
from strategies import scale_examples

TRANSCRIPTS = Path(__file__).parent / "transcripts"
TRANSCRIPT_NAMES = sorted(path.stem for path in TRANSCRIPTS.glob("*.sse"))

Message = dict[str, Any]


def read_transcript(name: str) -> bytes:
    """Return the bytes of a transcript."""
    return (TRANSCRIPTS / f"{name}.sse").read_bytes()


def read_messages(name: str) -> list[Message]:
    """Return the server events of a transcript."""
    lines = read_transcript(name).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def encode_sse(events: Iterable[Message]) -> bytes:
    """Encode events as the bytes of a stream."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def decode(*chunks: bytes, decoder: ResponsesDecoder | None = None) -> list[StreamEvent]:
    """Return the events a decoder gives for these chunks and the end of the stream."""
    decoder = decoder or ResponsesDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return events + decoder.close()


def assemble(events: Iterable[StreamEvent]) -> Outcome:
    """Return the outcome an assembler gives for these events."""
    assembler = Assembler()
    for event in events:
        assembler.feed(event)
    return assembler.finish()


def decode_outcome(*chunks: bytes) -> Outcome:
    """Decode and assemble chunks of bytes."""
    return assemble(decode(*chunks))


def replay(events: Iterable[Message]) -> Outcome:
    """Encode, decode and assemble a server's events."""
    return decode_outcome(encode_sse(events))


def item_event(kind: str, item: Message, at: int = 0) -> Message:
    """Return the start (``added``) or the end (``done``) of an item."""
    return {"type": f"response.output_item.{kind}", "output_index": at, "item": item}


def message_item(text: str, item_id: str = "m", **more: Any) -> Message:
    """Return a message of the model."""
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, **more}


def response_event(kind: str, **response: Any) -> Message:
    """Return an event of a response."""
    return {"type": f"response.{kind}", "response": {"id": "resp_1", **response}}


def text_delta(text: Any, item_id: str = "m", **more: Any) -> Message:
    """Return a piece of text."""
    kind = "response.output_text.delta"
    return {"type": kind, "item_id": item_id, "output_index": 0, "delta": text, **more}


def choose_cuts(stream: bytes) -> list[int]:
    """Return the positions to cut a stream at: around each line end and every 23 bytes, or all of them.

    All of them are tested in a campaign, that is with more examples than in ``make test``.
    """
    positions = range(len(stream) + 1)
    if scale_examples(1) > 1:
        return list(positions)
    return [at for at in positions if at % 23 == 0 or b"\n" in stream[max(at - 2, 0) : at + 2]]


def _list_types(annotation: Any) -> set[str]:
    """Return the ``type`` of every member of a union of the SDK's event models."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    field = getattr(annotation, "model_fields", {}).get("type")
    arms = (field.annotation,) if field else typing.get_args(annotation)
    return {kind for arm in arms for kind in _list_types(arm)}


PASSED_ON = _list_types(ResponseStreamEvent | ResponsesServerEvent) - {
    *ResponsesDecoder.EVENT_READERS
} | {"keepalive"}
"""The known events of the Responses API that are passed on without being interpreted."""
