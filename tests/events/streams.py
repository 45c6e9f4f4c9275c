"""Streams for the tests: recorded-shape transcripts, and short ways to make, cut and read others."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kedge.events import Assembler, Outcome, ResponsesDecoder, StreamEvent

TRANSCRIPTS = Path(__file__).parent / "transcripts"
TRANSCRIPT_NAMES = sorted(path.stem for path in TRANSCRIPTS.glob("*.sse"))

Message = dict[str, Any]


def read_transcript(name: str) -> bytes:
    """The bytes of a transcript."""
    return (TRANSCRIPTS / f"{name}.sse").read_bytes()


def read_messages(name: str) -> list[Message]:
    """The events of a transcript, as the server wrote them."""
    lines = read_transcript(name).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def encode_sse(events: Iterable[Message]) -> bytes:
    """Events as the bytes of a stream."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def decode(*chunks: bytes, decoder: ResponsesDecoder | None = None) -> list[StreamEvent]:
    """What a decoder says to these chunks and to their end."""
    decoder = decoder or ResponsesDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return events + decoder.close()


def assemble(events: Iterable[StreamEvent]) -> Outcome:
    """What an assembler makes of these events."""
    assembler = Assembler()
    for event in events:
        assembler.feed(event)
    return assembler.finish()


def decode_outcome(*chunks: bytes) -> Outcome:
    """From bytes to the outcome."""
    return assemble(decode(*chunks))


def replay(events: Iterable[Message]) -> Outcome:
    """From a server's events to the outcome."""
    return decode_outcome(encode_sse(events))
